"""The op tables of each preset, by device type."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from amp_fx.errors import PolicyWarning
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import FLOAT8_PRESETS, float8_table
from amp_fx.tables.ipex import IPEX_CPU
from amp_fx.tables.lean import lean
from amp_fx.tables.op_names import is_functional, ops, overloads_by_packet
from amp_fx.tables.products import MODULE_PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amp_fx.tables.cast_policy import Table

Version: TypeAlias = tuple[int, int]
"""A torch version without its patch number, such as ``(2, 13)``."""

MEASURED = Path(__file__).parent / "measured"
"""Folder of the measured files: one per torch version for policies, and one for mixtures."""


def measured_file(version: Version) -> Path:
    """Returns the path of a torch version's file, which ``tests.tables.measure`` writes."""
    return MEASURED / "torch-{}.{}.json".format(*version)


def _version(text: str) -> Version:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


VERSIONS: tuple[Version, ...] = tuple(
    sorted(_version(path.name) for path in MEASURED.glob("torch-*"))
)
"""Supported torch versions: those with a file."""


def torch_version() -> Version:
    """Returns the version of the installed torch."""
    return _version(torch.__version__)


def nearest(version: Version, versions: Sequence[Version] = VERSIONS) -> Version:
    """Returns the newest version with a file that is not newer than ``version``."""
    return max((other for other in versions if other <= version), default=versions[0])


_INSTALLED = nearest(torch_version())
"""The version whose tables are those of the installed torch."""


def warn_unknown_torch(version: Version | None = None) -> None:
    """Warns if the installed torch has no file."""
    version = torch_version() if version is None else version
    if version in VERSIONS:
        return
    warnings.warn(
        "amp_fx was tested with torch {}.{} to {}.{}, but this is torch {}.{}. It uses the op "
        "lists of torch {}.{}".format(*VERSIONS[0], *VERSIONS[-1], *version, *nearest(version)),
        PolicyWarning,
        stacklevel=3,
    )


@functools.cache
def torch_tables(version: Version) -> Mapping[str, Table]:
    """Returns the tables of ``torch.autocast`` in a supported version."""
    devices = json.loads(measured_file(version).read_text(encoding="utf-8"))
    return {
        device_type: {
            f"aten::{op}": CastPolicy(policy) for policy, names in groups.items() for op in names
        }
        for device_type, groups in devices.items()
    }


def installed_tables() -> Mapping[str, Table]:
    """Returns the tables of ``torch.autocast`` in the installed torch."""
    return torch_tables(_INSTALLED)


def reference_table() -> Table:
    """Returns the policies that ``ATen/autocast_mode.h`` provides for backends outside of PyTorch.

    These are the lists ``AT_FORALL_*``. XPU registers the same policies, and a ban.
    """
    xpu = installed_tables()["xpu"]
    return {op: policy for op, policy in xpu.items() if policy is not CastPolicy.BANNED}


def device_table() -> Table:
    """Returns the default table of ``register_device``.

    It consists of the reference lists, and the ban of ``binary_cross_entropy``, which each device
    of PyTorch with these lists registers as well.
    """
    return installed_tables()["xpu"]


def _ipex_tables() -> Mapping[str, Table]:
    packets = overloads_by_packet()
    cpu = {
        overload: policy
        for policy, names in IPEX_CPU.items()
        for op in ops(names)
        for packet in fnmatch.filter(packets, op) or [op]
        for overload in _functional(packet, packets)
    }
    return {**installed_tables(), "cpu": cpu}


def _functional(packet: str, packets: Mapping[str, list[str]]) -> list[str]:
    """Returns the functional overloads of a packet; the packet itself if torch has removed it."""
    return [op for op in packets[packet] if is_functional(op)] if packet in packets else [packet]


def _lean_tables() -> Mapping[str, Table]:
    return {device_type: lean(table) for device_type, table in installed_tables().items()}


def _float8_tables() -> Mapping[str, Table]:
    return {device_type: float8_table(table) for device_type, table in installed_tables().items()}


PRESETS: Mapping[str, Callable[[], Mapping[str, Table]]] = {
    "torch": installed_tables,
    "ipex": _ipex_tables,
    "lean": _lean_tables,
    **{"torch-{}.{}".format(*v): functools.partial(torch_tables, v) for v in VERSIONS},
    **dict.fromkeys(FLOAT8_PRESETS, _float8_tables),
    **dict.fromkeys(MODULE_PRESETS, installed_tables),
}
"""Functions that return the tables of each preset."""


warn_unknown_torch()  # once, because the first use of amp_fx imports this module

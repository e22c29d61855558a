"""The op tables of each preset, by device type."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import TorchVersionWarning
from amp_fx.tables import DEVICES
from amp_fx.tables.build import build_table, is_functional, overloads_by_packet
from amp_fx.tables.float8 import FLOAT8_PRESETS, float8_table
from amp_fx.tables.ipex import IPEX_ROWS
from amp_fx.tables.lean import lean
from amp_fx.tables.versions import NEWEST, OLDEST, VERSIONS, Version, active

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amp_fx.tables.build import Table


def torch_version() -> Version:
    """The installed torch's version, without its patch: ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def warn_newer_torch(version: Version | None = None) -> None:
    """Warns, once, of a torch that nobody has tried this version of amp_fx on."""
    version = torch_version() if version is None else version
    if version <= NEWEST:
        return
    warnings.warn(
        "amp_fx was tested on torch {}.{} to {}.{}; this is {}.{}. The dtypes of ops may "
        "differ from its autocast: `python -m amp_fx policy --check` compares the lists of "
        "ops".format(*OLDEST, *NEWEST, *version),
        TorchVersionWarning,
        stacklevel=3,
    )


def _tables_of(version: Version) -> dict[str, Table]:
    return {device_type: active(table, version) for device_type, table in DEVICES.items()}


def _installed_tables() -> dict[str, Table]:
    return _tables_of(torch_version())


def _ipex_tables() -> dict[str, Table]:
    packets = overloads_by_packet()
    cpu = build_table((policy, _expand(names, packets)) for policy, names in IPEX_ROWS)
    return {**_installed_tables(), "cpu": cpu}


def _lean_tables() -> dict[str, Table]:
    return {device_type: lean(table) for device_type, table in _installed_tables().items()}


def _float8_tables() -> dict[str, Table]:
    return {device_type: float8_table(table) for device_type, table in _installed_tables().items()}


def _expand(names: Iterable[str], packets: Mapping[str, list[str]]) -> list[str]:
    """Packets as their functional overloads; a packet that is gone stands as it is."""
    found = [packet for name in names for packet in fnmatch.filter(packets, name) or (name,)]
    overloads = (op for packet in found for op in packets.get(packet, ()))
    return [*filter(is_functional, overloads), *(p for p in found if p not in packets)]


PRESETS: Mapping[str, Callable[[], dict[str, Table]]] = {
    "torch": _installed_tables,
    "ipex": _ipex_tables,
    "lean": _lean_tables,
    **{"torch-{}.{}".format(*v): functools.partial(_tables_of, v) for v in VERSIONS},
    **dict.fromkeys(FLOAT8_PRESETS, _float8_tables),
}
"""What makes the tables, by name."""

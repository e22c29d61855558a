"""Which op gets which cast policy on which device: op tables under a name."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import PolicyError
from amp_fx.op_names import all_ops, is_functional, overloads_by_packet
from amp_fx.tables import DEVICES
from amp_fx.tables.build import build_table, check_entry
from amp_fx.tables.ipex import IPEX_ROWS
from amp_fx.tables.reference import REFERENCE
from amp_fx.tables.versions import VERSIONS, Version, active

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amp_fx.cast_policy import CastPolicy
    from amp_fx.tables.build import Table


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A named set of op tables, one per device type; cannot be changed.

    Policies are equal, and hash alike, if their tables are: the name is a label.

    Attributes:
        name: What to call it; a preset's name, for one.
        tables: By device type, the cast policy of each op by its qualified overload name
            (``"aten::softmax.int"``; the default overload has no suffix). Copied.

    Raises:
        PolicyError: A name is not qualified, or a policy is not a ``CastPolicy``.
    """

    name: str = dataclasses.field(compare=False)
    tables: Mapping[str, Table]

    def __post_init__(self) -> None:
        """Checks the entries and replaces the tables by read-only copies."""
        copies = {device_type: _read_only(table) for device_type, table in self.tables.items()}
        object.__setattr__(self, "tables", types.MappingProxyType(copies))

    @classmethod
    def default(cls) -> Policy:
        """The policy of ``torch.autocast`` in the installed torch: ``preset("torch")``."""
        return preset("torch")

    def rule(self, op: torch._ops.OpOverload, device_type: str) -> CastPolicy | None:
        """The policy of one op overload on one device type; None if it has none.

        A device type without a table, such as a new accelerator, has no policies at all.
        """
        table = self.tables.get(device_type)
        return None if table is None else table.get(op.name())  # type: ignore[no-untyped-call]

    def with_device(self, device_type: str, table: Table | None = None) -> Policy:
        """A copy with a table for one more device type, or another one for a known type.

        Args:
            device_type: As in ``torch.device(...).type``; for a backend outside of PyTorch
                the name given to ``torch.utils.rename_privateuse1_backend``.
            table: Policies by qualified overload name. None takes the lists that
                ``ATen/autocast_mode.h`` offers to new accelerators (``AT_FORALL_*``), as of
                the installed torch.

        Raises:
            PolicyError: The device type is empty or has an index, or an entry is not usable.
        """
        if not device_type or ":" in device_type:
            raise PolicyError(f"{device_type!r} is not a device type; write it like 'cuda'")
        if table is None:
            table = active(REFERENCE, torch_version())
        return Policy(self.name, {**self.tables, device_type: table})

    def gone(self, device_type: str) -> tuple[str, ...]:
        """Ops in a table that the installed torch does not have, sorted.

        They are kept, and never met: a name from another torch version, or one that a list
        from elsewhere has and torch has removed.
        """
        return tuple(sorted(set(self.tables.get(device_type, ())) - all_ops()))

    def __hash__(self) -> int:
        """By content, as equality is."""
        return hash(frozenset((d, frozenset(t.items())) for d, t in self.tables.items()))

    def __repr__(self) -> str:
        """The name, and how many ops each device type has."""
        counts = ", ".join(f"{d}: {len(table)} ops" for d, table in self.tables.items())
        return f"Policy({self.name!r}, {counts or 'no devices'})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles plain dictionaries: read-only views cannot be."""
        return Policy, (self.name, {d: dict(table) for d, table in self.tables.items()})


def preset(name: str) -> Policy:
    """A policy by name.

    Args:
        name: ``"torch"`` is what ``torch.autocast`` does in the installed version;
            ``"torch-2.11"`` and its like, what it did in another; ``"ipex"`` takes the CPU
            lists of Intel Extension for PyTorch, and torch's own for all other devices.

    Raises:
        PolicyError: There is no such preset; lists those there are.
    """
    if name not in _PRESETS:
        raise PolicyError(_unknown_preset(name))
    return _build(name)


def add_device(device_type: str, table: Table | None) -> None:
    """Gives all presets a table for one more device type; see ``Policy.with_device``.

    Presets that were taken before keep their tables.
    """
    checked = Policy("", {}).with_device(device_type, table)
    _added[device_type] = checked.tables[device_type]
    _build.cache_clear()


def preset_names() -> tuple[str, ...]:
    """The names that ``preset`` takes."""
    return tuple(_PRESETS)


def torch_version() -> Version:
    """The installed torch's version, without its patch: ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_added: dict[str, Table] = {}
"""Tables of devices that are not PyTorch's own (``add_device``)."""


@functools.cache
def _build(name: str) -> Policy:
    return Policy(name, {**_PRESETS[name](), **_added})


def _tables_of(version: Version) -> dict[str, Table]:
    return {device_type: active(table, version) for device_type, table in DEVICES.items()}


def _installed_tables() -> dict[str, Table]:
    return _tables_of(torch_version())


def _ipex_tables() -> dict[str, Table]:
    packets = overloads_by_packet()
    cpu = build_table((policy, _expand(names, packets)) for policy, names in IPEX_ROWS)
    return {**_installed_tables(), "cpu": cpu}


def _expand(names: Iterable[str], packets: Mapping[str, list[str]]) -> list[str]:
    """Packets as their functional overloads; a packet that is gone stands as it is."""
    found = [packet for name in names for packet in fnmatch.filter(packets, name) or (name,)]
    overloads = (op for packet in found for op in packets.get(packet, ()))
    return [*filter(is_functional, overloads), *(p for p in found if p not in packets)]


def _read_only(table: Table) -> Table:
    for op, policy in table.items():
        check_entry(op, policy)
    return types.MappingProxyType(dict(table))


def _unknown_preset(name: str) -> str:
    near = difflib.get_close_matches(name, _PRESETS, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no preset {name!r}; there are {', '.join(_PRESETS)}{meant}"


_PRESETS: Mapping[str, Callable[[], dict[str, Table]]] = {
    "torch": _installed_tables,
    "ipex": _ipex_tables,
    **{"torch-{}.{}".format(*v): functools.partial(_tables_of, v) for v in VERSIONS},
}

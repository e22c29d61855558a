"""The ``Policy`` class, which holds the cast policies of all ops, and the presets."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import as_dtype, dtype_name, is_low
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies.changes import arg_override, module_overrides, op_overrides, table_entries
from amp_fx.policies.decide import Resolver
from amp_fx.policies.files import check_entries, groups_of, merge_groups, read_toml, to_toml
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import FLOAT8_PRESETS, Float8
from amp_fx.tables.op_names import all_ops
from amp_fx.tables.presets import PRESETS, reference_table
from amp_fx.tables.products import MODULE_PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from amp_fx.policies.changes import (
        ArgOverride,
        ModuleOverride,
        ModulePolicy,
        OpOverride,
        Treatment,
    )
    from amp_fx.tables.cast_policy import Table
    from amp_fx.torch_private.ops import OpOverload


_FLOAT8 = Float8()


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """The cast policy of each op, per device type, and overrides; immutable.

    Policies compare and hash by content; ``name`` is ignored. The methods ``with_*`` return a copy.
    Later overrides win over earlier ones, and module overrides win over op overrides.

    Attributes:
        name: The name of the policy, such as that of a preset.
        tables: For each device type, the cast policy of each op by qualified overload name
            (``"aten::softmax.int"``; the default overload has no suffix), with ``ops`` applied.
            The tables are copied. Names that are not qualified are those of ``with_ops``.
        ops: The overrides of ``with_ops``, in order.
        modules: The overrides of ``with_modules``, in order.
        args: The overrides of ``with_args``, in order.
        dtypes: For each device type, the low dtype of autocast regions without a ``dtype``.
        float8: The settings of products with the policy ``"float8"``.

    Raises:
        PolicyError: An op or a policy in a table is unknown.
    """

    name: str = dataclasses.field(compare=False)
    tables: Mapping[str, Table]
    ops: tuple[OpOverride, ...] = ()
    modules: tuple[ModuleOverride, ...] = ()
    args: tuple[ArgOverride, ...] = ()
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    float8: Float8 = _FLOAT8

    def __post_init__(self) -> None:
        """Checks the entries and replaces the tables with read-only copies."""
        copies: dict[str, Table] = {}
        for device_type, table in self.tables.items():
            is_canonical = all(
                isinstance(op, str) and "::" in op and isinstance(policy, CastPolicy)
                for op, policy in table.items()
            )
            entries = dict(table) if is_canonical else table_entries(table)
            copies[device_type] = types.MappingProxyType(entries)
        object.__setattr__(self, "tables", types.MappingProxyType(copies))

    @classmethod
    def default(
        cls, device_type: str | None = None, dtype: torch.dtype | str | None = None
    ) -> Policy:
        """Returns the policy of ``torch.autocast`` in the installed torch, ``preset("torch")``.

        Args:
            device_type: The device type to which ``dtype`` applies; None for all device types. The
                policy has the tables of all device types in either case.
            dtype: The low dtype of autocast regions without a ``dtype``, or its name.

        Raises:
            PolicyError: The device type has no table, or autocast does not support the dtype.
        """
        policy = preset("torch")
        if device_type is not None and device_type not in policy.tables:
            allowed = ", ".join(policy.tables)
            raise PolicyError(f"expected device_type to be one of {allowed}, got {device_type!r}")
        return policy if dtype is None else policy.with_dtype(dtype, device_type)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Reads a policy file: TOML with the entries of ``from_dict``. Runs no code of the file.

        Raises:
            PolicyError: The file cannot be read, or an entry is invalid.
        """
        try:
            return cls.from_dict(read_toml(path))
        except PolicyError as error:
            raise PolicyError(f"policy file {str(path)!r}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a policy file.

        Raises:
            PolicyError: As for ``to_dict``.
        """
        Path(path).write_text(str(self), encoding="utf-8")

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Policy:
        """Returns the policy with the given entries, such as those of a policy file.

        Keys and values are those of ``with_ops``, ``with_modules`` and ``with_args``. A mapping
        holds the argument of one call, and a list of mappings those of several calls. ``tables``
        replaces the tables of devices. ``devices`` lists the device types if they differ from those
        of the preset. Classes of modules are named ``"class:package.module.Name"``, and their
        modules must be imported. For example, as a file::

            base = "torch"
            dtype = "float16"                    # or: dtype = { cuda = "float16" }
            float8 = { recipe = "rowwise", least_in = 1024, least_out = 1024 }

            [ops]
            softmax = "lower_precision_fp"

            [modules]
            "decoder.*.norm" = "fp32"
            "decoder.0.attn" = { matmul = "fp32" }   # single ops in the module

            [args]
            index_add = { source = "same_as:self" }

        Raises:
            PolicyError: An entry is invalid. The message contains its key.
        """
        check_entries(entries)
        base = preset(entries.get("base", "torch"))
        tables = {**base.tables, **entries.get("tables", {})}
        devices = entries.get("devices", tables)
        missing = [device for device in devices if device not in tables]
        if missing:
            raise PolicyError(f"key 'devices': {missing[0]!r} has no table in {base.name!r}")
        tables = {device: tables[device] for device in devices}
        policy = dataclasses.replace(base, name=entries.get("name", base.name), tables=tables)
        policy = policy.with_float8(**entries.get("float8", {}))
        dtypes = entries.get("dtype", {})
        for device, dtype in dtypes.items() if isinstance(dtypes, dict) else [(None, dtypes)]:
            policy = policy.with_dtype(dtype, device)
        for ops in groups_of(entries, "ops"):
            policy = policy.with_ops(ops)
        # At once, because each change copies the policy, and a file may list thousands of modules.
        listed, modules = policy._listed(), policy.modules
        for given in groups_of(entries, "modules"):
            modules += module_overrides(given, listed)
        policy = dataclasses.replace(policy, modules=modules)
        for args in groups_of(entries, "args"):
            for op, given in args.items():
                policy = policy.with_args(op, given)
        return policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the preset on which the policy is based, and the overrides, as plain data.

        Raises:
            PolicyError: A module class cannot be found by its name.
        """
        base = preset(self.name if self.name in PRESETS else "torch")
        if self.modules[: len(base.modules)] != base.modules:
            base = preset("torch")
        modules = self.modules[len(base.modules) :]
        for module in modules:
            module.check_name()
        float8, default = dataclasses.asdict(self.float8), dataclasses.asdict(base.float8)
        entries: dict[str, Any] = {
            "name": self.name if self.name != base.name else None,
            "base": base.name,
            "devices": [*self.tables] if set(self.tables) != set(base.tables) else None,
            "dtype": {device: dtype_name(dtype) for device, dtype in self.dtypes},
            "float8": {name: value for name, value in float8.items() if value != default[name]},
            "tables": {
                device: {op: table[op].value for op in sorted(table)}
                for device, table in self.tables.items()
                if table != with_changes(base.tables.get(device, {}), self.ops)
            },
        }
        entries = {key: value for key, value in entries.items() if value not in (None, {})}
        calls: dict[str, list[dict[str, Any]]] = {
            "ops": [{o.pattern: o.policy.value} for o in self.ops],
            "modules": [
                {m.text: {m.op: m.policy.value} if m.op else m.policy.value} for m in modules
            ],
            "args": [{a.pattern: dict(a.args)} for a in self.args],
        }
        calls = {key: groups for key, groups in calls.items() if groups}
        merged = entries | {key: merge_groups(groups) for key, groups in calls.items()}
        try:
            is_equal = Policy.from_dict(merged) == self
        except PolicyError:  # an op with two policies, of which the later one wins
            is_equal = False
        return merged if is_equal else entries | calls

    def rule(self, op: OpOverload, device_type: str) -> CastPolicy | None:
        """Returns the cast policy of an op overload on a device type, or None without one.

        Module overrides are not applied. A device type without a table, such as a new
        accelerator, has no cast policies.
        """
        table = self.tables.get(device_type)
        return None if table is None else table.get(op.name())  # type: ignore[no-untyped-call]

    @functools.cached_property
    def resolver(self) -> Resolver:
        """Returns the object that selects the cast policy of each call."""
        return Resolver(self.tables, self.ops, self.modules, self.args)

    def low_dtype(self, device_type: str) -> torch.dtype | None:
        """Returns the low dtype of autocast regions without a ``dtype``.

        Returns None if ``torch.autocast`` selects it.
        """
        return dict(self.dtypes).get(device_type)

    def with_dtype(self, dtype: torch.dtype | str, device_type: str | None = None) -> Policy:
        """Returns a copy with another low dtype for autocast regions without a ``dtype``.

        Args:
            dtype: ``torch.bfloat16`` or ``torch.float16``, or the name of one (``"bf16"``).
            device_type: The device type to which it applies; None for all that have a table.

        Raises:
            PolicyError: Autocast does not support the dtype.
        """
        low_dtype = as_dtype(dtype)
        if low_dtype is None or not is_low(low_dtype):
            raise PolicyError(
                f"expected dtype to be torch.bfloat16 or torch.float16, got {dtype!r}"
            )
        devices = self.tables if device_type is None else (device_type,)
        dtypes = dict(self.dtypes) | dict.fromkeys(devices, low_dtype)
        return dataclasses.replace(self, dtypes=tuple(sorted(dtypes.items(), key=str)))

    def with_float8(
        self,
        recipe: str | None = None,
        *,
        least_in: int | None = None,
        least_out: int | None = None,
        source: str | None = None,
    ) -> Policy:
        """Returns a copy with other settings for products with the policy ``"float8"``.

        Args:
            recipe: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise-gw-hp"``.
            least_in: Products that sum over fewer elements use the low dtype.
            least_out: Products with fewer outputs use the low dtype.
            source: ``"stored"`` quantizes weights as stored. ``"bfloat16"`` rounds them to bfloat16
                first, so that a rollout engine that loads a bfloat16 checkpoint quantizes the same
                numbers.

        Raises:
            PolicyError: The recipe or source is unknown, or a size is not a positive integer.
        """
        given = {"recipe": recipe, "least_in": least_in, "least_out": least_out, "source": source}
        changed: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        return dataclasses.replace(self, float8=dataclasses.replace(self.float8, **changed))

    def with_ops(self, policies: Mapping[Any, Treatment]) -> Policy:
        """Returns a copy with other cast policies for some ops, on all device types.

        Args:
            policies: Cast policies by op. An op is a packet (``"softmax"``, all overloads that
                support the policy), an overload (``"aten::softmax.int"``) or a glob
                (``"linalg_*"``), with or without ``aten::``; ``"mylib::op"`` for a custom op, whose
                library must be imported before; or the op itself (``torch.ops.aten.softmax``, or
                the result of ``torch.library.custom_op``). Names win over globs.

        Raises:
            PolicyError: An op or a policy is unknown (the message suggests similar names), an op is
                given twice with different policies, or an op does not support its policy.
        """
        added = op_overrides(policies, self._listed())
        tables = {device: with_changes(table, added) for device, table in self.tables.items()}
        return dataclasses.replace(self, tables=tables, ops=(*self.ops, *added))

    def with_modules(self, policies: Mapping[Any, ModulePolicy]) -> Policy:
        """Returns a copy with other cast policies for the ops in some modules.

        Args:
            policies: Cast policies by module. A module is a glob for the path from the compiled
                module (``"decoder.*.norm"``; ``*`` also matches dots), a compiled regular
                expression or ``"re:..."`` for the whole path, or a class, which includes its
                subclasses. Submodules of a matching module match as well. The policy applies to all
                ops that return new tensors (``lower_precision_fp``, ``fp32``, ``promote``,
                ``keep``, ``same_as_input``), or to all products (``float8``,
                ``lower_precision_wide``). A mapping sets the policies of single ops
                in the module, which are named as in ``with_ops``:
                ``{"h.0.attn": {"matmul": "fp32"}}``.

        Raises:
            PolicyError: A pattern is invalid, an op or a policy is unknown, or an op is private,
                writes to its inputs or returns a view.
        """
        added = module_overrides(policies, self._listed())
        return dataclasses.replace(self, modules=(*self.modules, *added))

    def with_args(self, op: Any, args: Mapping[str, Treatment]) -> Policy:
        """Returns a copy with other cast policies for single arguments of an op.

        Args:
            op: As in ``with_ops``.
            args: Cast policies by argument: ``"same_as:<another argument>"`` (the dtype of the
                other argument after its cast), ``"fp32"``, ``"lower_precision_fp"`` or ``"keep"``.
                Both operands of a product together also support ``"float8"`` and
                ``"lower_precision_wide"``.

        Raises:
            PolicyError: The op has no such tensor argument, or the policy is not allowed.
        """
        return dataclasses.replace(self, args=(*self.args, arg_override(op, args, self._listed())))

    def with_device(self, device_type: str, table: Mapping[Any, Treatment] | None = None) -> Policy:
        """Returns a copy with a new table for a device type. The overrides of ``with_ops`` apply.

        Args:
            device_type: A device type as in ``torch.device(...).type``. For an out-of-tree backend,
                the name given to ``torch.utils.rename_privateuse1_backend``.
            table: Cast policies by qualified overload name (``"aten::sum"`` is the overload
                without a suffix), or by ops as in ``with_ops``. None takes the lists that
                ``ATen/autocast_mode.h`` provides for new accelerators (``AT_FORALL_*``), as of the
                installed torch.

        Raises:
            PolicyError: The device type is empty or has an index, or an entry is invalid.
        """
        if not isinstance(device_type, str) or not device_type or ":" in device_type:
            raise PolicyError(f"expected a device type like 'cuda', got {device_type!r}")
        entries = reference_table() if table is None else table_entries(table)
        changed = with_changes(entries, self.ops)
        return dataclasses.replace(self, tables={**self.tables, device_type: changed})

    def gone(self, device_type: str) -> tuple[str, ...]:
        """Returns the ops in a table that the installed torch does not have, sorted.

        These are ops of another torch version, or ops that were removed. They have no effect.
        """
        return tuple(sorted(set(self.tables.get(device_type, ())) - all_ops()))

    def _listed(self) -> set[str]:
        return {op for table in self.tables.values() for op in table}

    def __hash__(self) -> int:
        """Hashes the fields that ``==`` compares."""
        return hash((self._tables_hash, self.ops, self.modules, self.args, self.dtypes))

    @functools.cached_property
    def _tables_hash(self) -> int:
        return hash(frozenset((d, frozenset(t.items())) for d, t in self.tables.items()))

    def __repr__(self) -> str:
        """Returns the name, the number of ops per device type, and the number of overrides."""
        counts = [f"{d}: {len(table)} ops" for d, table in self.tables.items()] or ["no devices"]
        changes = {kind: len(getattr(self, kind)) for kind in ("ops", "modules", "args")}
        counts += [f"with {kind}: {number}" for kind, number in changes.items() if number]
        counts += [f"dtype on {device}: {dtype}" for device, dtype in self.dtypes]
        float8, defaults = dataclasses.asdict(self.float8), dataclasses.asdict(_FLOAT8)
        counts += [f"float8 {k}: {value}" for k, value in float8.items() if value != defaults[k]]
        return f"Policy({self.name!r}, {', '.join(counts)})"

    def __str__(self) -> str:
        """Returns the text of a policy file."""
        return to_toml(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles tables as plain dictionaries, because read-only views cannot be pickled."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restored, ({**fields, "tables": _plain(self.tables)},)


def with_changes(table: Table, overrides: Iterable[OpOverride]) -> dict[str, CastPolicy]:
    """Returns a table with overrides of ``with_ops`` applied."""
    changes = {op: override.policy for override in overrides for op in override.overloads}
    return {**table, **changes}


def _plain(tables: Mapping[str, Table]) -> dict[str, dict[str, CastPolicy]]:
    return {device: dict(table) for device, table in tables.items()}


def _restored(fields: dict[str, Any]) -> Policy:
    return Policy(**fields)


def as_policy(policy: object) -> Policy:
    """Converts a value to a policy.

    Args:
        policy: A policy, the name of a preset, or the path (``*.toml``) of a policy file.

    Raises:
        PolicyError: The value is none of these, or the file cannot be read.
    """
    if isinstance(policy, os.PathLike):
        return Policy.load(policy)
    if isinstance(policy, str):
        return Policy.load(policy) if policy.endswith(".toml") else preset(policy)
    if isinstance(policy, Policy):
        return policy
    raise PolicyError(
        "expected policy to be an amp_fx.Policy, the name of a preset "
        f"({', '.join(preset_names())}), or the path of a policy file (*.toml), got {policy!r}"
    )


def preset(name: str) -> Policy:
    """Returns a policy by name.

    ``"torch"`` is the policy of ``torch.autocast`` in the installed torch, ``"torch-2.13"`` that of
    another version. The other presets change some entries of ``"torch"``:

    - ``"ipex"`` has the CPU lists of Intel Extension for PyTorch.
    - ``"lean"`` has low-precision inputs and results of norms, and low-precision residual sums.
    - ``"float8-tensorwise"``, ``"float8-rowwise"`` and ``"float8-rowwise-gw-hp"`` have products in
      float8.
    - ``"router"`` and ``"head"`` have float32 results of routers of mixtures of experts, or of
      output heads (``"lower_precision_wide"``).

    Args:
        name: The name of a preset.

    Raises:
        PolicyError: The preset is unknown. The message lists all presets.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise PolicyError(_unknown_preset(name))
    return _build(name)


def add_device(device_type: str, table: Mapping[Any, Treatment] | None) -> None:
    """Adds a table for a device type to all presets (``Policy.with_device``).

    Policies that were created from presets before do not change.
    """
    checked = Policy("", {}).with_device(device_type, table)
    _added[device_type] = checked.tables[device_type]
    _build.cache_clear()


def preset_names() -> tuple[str, ...]:
    """Returns the names of all presets."""
    return tuple(PRESETS)


_added: dict[str, Table] = {}
"""Tables of out-of-tree devices (``add_device``)."""


@functools.cache
def _build(name: str) -> Policy:
    if name in MODULE_PRESETS:
        return dataclasses.replace(_build("torch").with_modules(MODULE_PRESETS[name]), name=name)
    tables = {**PRESETS[name](), **_added}
    return Policy(name, tables, float8=FLOAT8_PRESETS.get(name, _FLOAT8))


def _unknown_preset(name: str) -> str:
    suggestion = did_you_mean(name, PRESETS)
    return f"there is no preset {name!r}; the presets are {', '.join(PRESETS)}{suggestion}"

"""Policies: op tables under a name, and what a user changes on top of them."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import as_dtype, is_low
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies.changes import (
    arg_override,
    check_mapping,
    module_overrides,
    op_overrides,
    path_of,
    rule_override,
)
from amp_fx.policies.decide import Resolver
from amp_fx.tables.cast_policy import check_entry
from amp_fx.tables.float8 import FLOAT8_PRESETS, RECIPES, SOURCES, Float8
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
        ModuleStack,
        OpOverride,
        Rule,
        RuleOverride,
        Treatment,
    )
    from amp_fx.tables.cast_policy import CastPolicy, Table
    from amp_fx.torch_private.ops import OpOverload


_FLOAT8 = Float8()


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """Op tables per device type, and changes to them; immutable.

    Policies are equal, and hash alike, if their contents are: the name is a label. The methods
    ``with_*`` return a copy. Of what they lay down, later beats earlier; what holds for a
    module beats what holds for an op, and a rule beats both.

    Attributes:
        name: What to call it; a preset's name, for one.
        tables: By device type, the cast policy of each op by its qualified overload name
            (``"aten::softmax.int"``; the default overload has no suffix), ``ops`` included.
            Copied.
        ops: What ``with_ops`` laid down, in order.
        modules: What ``with_modules`` laid down, in order.
        args: What ``with_args`` laid down, in order.
        rules: What ``with_rule`` laid down, in order.
        dtypes: By device type the low dtype of regions that name none.
        float8: How products run that are treated as ``"float8"``.

    Raises:
        PolicyError: A name is not qualified, or a policy is not a ``CastPolicy``.
    """

    name: str = dataclasses.field(compare=False)
    tables: Mapping[str, Table]
    ops: tuple[OpOverride, ...] = ()
    modules: tuple[ModuleOverride, ...] = ()
    args: tuple[ArgOverride, ...] = ()
    rules: tuple[RuleOverride, ...] = ()
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    float8: Float8 = _FLOAT8

    def __post_init__(self) -> None:
        """Checks the entries and replaces the tables by read-only copies."""
        copies = {device_type: _read_only(table) for device_type, table in self.tables.items()}
        object.__setattr__(self, "tables", types.MappingProxyType(copies))

    @classmethod
    def default(
        cls, device_type: str | None = None, dtype: torch.dtype | str | None = None
    ) -> Policy:
        """The policy of ``torch.autocast`` in the installed torch: ``preset("torch")``.

        Args:
            device_type: What ``dtype`` is for; None for all. The tables of the other device
                types are there as well.
            dtype: The low dtype of regions that name none, or its name.

        Raises:
            PolicyError: There is no table for the device type, or the dtype is not one to
                autocast to.
        """
        policy = preset("torch")
        if device_type is not None and device_type not in policy.tables:
            allowed = ", ".join(policy.tables)
            raise PolicyError(f"{device_type!r} has no table; the tables are for {allowed}")
        return policy if dtype is None else policy.with_dtype(dtype, device_type)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool | Iterable[str] = False) -> Policy:
        """Reads a policy file, as ``save`` writes it; see ``amp_fx.policies.saved``.

        Args:
            path: Of the file.
            trusted: Whether the file may name rules, which are functions that will be called,
                and classes whose modules have to be imported, which runs them. True allows all,
                a list of modules those and what is inside of them. Classes of modules that are
                imported already need no trust.

        Raises:
            PolicyError: The file cannot be read, or an entry is wrong or not trusted; names line
                and key.
        """
        from amp_fx.policies.saved import load

        return load(path, trusted=trusted)

    @classmethod
    def loads(cls, text: str, *, trusted: bool | Iterable[str] = False) -> Policy:
        """Reads the text of a policy file: what ``str`` gives of a policy.

        Args:
            text: Of the file.
            trusted: As for ``load``.

        Raises:
            PolicyError: An entry is wrong or not trusted; names line and key.
        """
        from amp_fx.policies.saved import loads

        return loads(text, trusted=trusted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a policy file: the preset that this one starts from, and the changes.

        Raises:
            PolicyError: A rule or a class of modules cannot be imported by name, so that a
                file cannot tell of it.
        """
        from amp_fx.policies.saved import save

        save(self, path)

    def rule(self, op: OpOverload, device_type: str) -> CastPolicy | None:
        """The policy of one op overload on one device type; None if it has none.

        That is what holds outside of the modules named by ``with_modules``, where no rule says
        otherwise. A device type without a table, such as a new accelerator, has no policies.
        """
        table = self.tables.get(device_type)
        return None if table is None else table.get(op.name())  # type: ignore[no-untyped-call]

    def for_modules(self, stack: ModuleStack) -> Policy:
        """This policy as it holds inside of some modules, wherever it is asked.

        A compiled graph is inside of no module when it runs: what holds for the modules around is
        laid down for all, and rules are told of these.
        """
        if not self.resolver.depends_on_module:
            return self
        overrides = self.resolver.module_overrides(stack)
        return dataclasses.replace(
            self,
            modules=tuple(dataclasses.replace(m, pattern="*") for m in reversed(overrides)),
            rules=tuple(rule.at(path_of(stack)) for rule in self.rules),
        )

    @functools.cached_property
    def resolver(self) -> Resolver:
        """Finds how one call is treated, and why."""
        return Resolver(self)

    def low_dtype(self, device_type: str) -> torch.dtype | None:
        """The low dtype of regions that name none; None leaves it to ``torch.autocast``."""
        return dict(self.dtypes).get(device_type)

    def with_dtype(self, dtype: torch.dtype | str, device_type: str | None = None) -> Policy:
        """A copy with another low dtype for regions that name none.

        Args:
            dtype: ``torch.bfloat16`` or ``torch.float16``, or a name of one (``"bf16"``).
            device_type: What it is for; None for all that have a table.

        Raises:
            PolicyError: It is not a dtype to autocast to.
        """
        found = as_dtype(dtype)
        if found is None or not is_low(found):
            raise PolicyError(
                f"dtype={dtype!r} is not one to autocast to: torch.bfloat16 or torch.float16"
            )
        devices = self.tables if device_type is None else (device_type,)
        dtypes = dict(self.dtypes) | dict.fromkeys(devices, found)
        return dataclasses.replace(self, dtypes=tuple(sorted(dtypes.items(), key=str)))

    def with_float8(
        self,
        recipe: str | None = None,
        *,
        least_in: int | None = None,
        least_out: int | None = None,
        source: str | None = None,
    ) -> Policy:
        """A copy that runs products otherwise that are treated as ``"float8"``.

        Args:
            recipe: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise-gw-hp"``.
            least_in: Products that sum over fewer elements stay in the low dtype.
            least_out: Products with fewer outputs stay in the low dtype.
            source: ``"stored"`` quantizes weights as they are stored, ``"bfloat16"`` after rounding
                them to bfloat16: a rollout engine that loads a bfloat16 checkpoint then quantizes
                the same numbers.

        Raises:
            PolicyError: There is no such recipe or source, or a size is no positive integer.
        """
        given = {"recipe": recipe, "least_in": least_in, "least_out": least_out, "source": source}
        changed: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        for name, allowed in (("recipe", RECIPES), ("source", SOURCES)):
            value = changed.get(name)
            if value is not None and value not in tuple(allowed):
                meant = did_you_mean(value, allowed)
                raise PolicyError(f"{name}={value!r} is not one of {', '.join(allowed)}{meant}")
        for name in ("least_in", "least_out"):
            size = changed.get(name, 1)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PolicyError(f"{name}={size!r} is not a positive integer")
        return dataclasses.replace(self, float8=dataclasses.replace(self.float8, **changed))

    def with_ops(self, policies: Mapping[Any, Treatment]) -> Policy:
        """A copy that casts some ops otherwise, on all device types.

        Args:
            policies: By op: a packet (``"softmax"``: all its overloads that can take the
                policy), an overload (``"aten::softmax.int"``) or a glob (``"linalg_*"``), with
                or without ``aten::``; ``"mylib::op"`` for one of a library's own, which must be
                imported before; or the op itself (``torch.ops.aten.softmax``, what
                ``torch.library.custom_op`` returns). A name wins over a glob.

        Raises:
            PolicyError: An op or a policy is unknown (suggests similar names), an op is named
                twice with different policies, or an op cannot take its policy.
        """
        added = op_overrides(policies, self._listed())
        tables = {device: with_changes(table, added) for device, table in self.tables.items()}
        return dataclasses.replace(self, tables=tables, ops=(*self.ops, *added))

    def with_modules(self, policies: Mapping[Any, ModulePolicy]) -> Policy:
        """A copy that casts the ops inside of some modules otherwise.

        Args:
            policies: By module: a glob for the path from the compiled module
                (``"decoder.*.norm"``; ``*`` also spans dots), a compiled regular expression
                or ``"re:..."`` for the whole path, or a class, which its subclasses belong to.
                Modules inside belong to a module too. It holds for all ops that make new
                tensors (``treatment``): one of ``lower_precision_fp``, ``fp32``, ``promote``,
                ``keep`` and ``same_as_input``, or for all products: ``float8``,
                ``lower_precision_wide`` or ``bfloat16x3``. A mapping instead is for single ops in
                the module and in those inside of it: ``{"h.0.attn": {"matmul": "fp32"}}``, where
                ops are named as in ``with_ops``.

        Raises:
            PolicyError: A pattern is none of these, an op or a policy is unknown, or the op
                is a view, writes to its inputs or is private.
        """
        added = module_overrides(policies, self._listed())
        return dataclasses.replace(self, modules=(*self.modules, *added))

    def with_rule(self, rule: Rule | str) -> Policy:
        """A copy with a function that is asked about every op that makes new tensors.

        Args:
            rule: Called as ``rule(op, module_path, shapes, dtypes)``: the qualified name of the
                overload, the path of the module around it, and a tuple each with the sizes and
                the dtypes of its tensors. Gives a cast policy, its name, or None for no opinion.
                It must depend on these alone. A string names it: ``"package.module:name"``.

        Raises:
            PolicyError: It is no function.
        """
        return dataclasses.replace(self, rules=(*self.rules, rule_override(rule)))

    def with_args(self, op: Any, args: Mapping[str, Treatment]) -> Policy:
        """A copy that treats single arguments of an op otherwise than the op's policy says.

        Args:
            op: As in ``with_ops``.
            args: By argument ``"same_as:<another argument>"`` (its dtype, after its own cast),
                ``"fp32"``, ``"lower_precision_fp"`` or ``"keep"``; for both operands of a product
                also ``"float8"``, ``"lower_precision_wide"`` or ``"bfloat16x3"``.

        Raises:
            PolicyError: The op has no such tensor argument, or the value is not allowed.
        """
        return dataclasses.replace(self, args=(*self.args, arg_override(op, args, self._listed())))

    def with_device(self, device_type: str, table: Table | None = None) -> Policy:
        """A copy with a table for one more device type, or another one for a known type.

        What ``with_ops`` laid down holds there too.

        Args:
            device_type: As in ``torch.device(...).type``; for a backend outside of PyTorch
                the name given to ``torch.utils.rename_privateuse1_backend``.
            table: Policies by qualified overload name. None takes the lists that
                ``ATen/autocast_mode.h`` offers to new accelerators (``AT_FORALL_*``), as of
                the installed torch.

        Raises:
            PolicyError: The device type is empty or has an index, or an entry is not usable.
        """
        if not isinstance(device_type, str) or not device_type or ":" in device_type:
            raise PolicyError(f"{device_type!r} is not a device type; write it like 'cuda'")
        if table is None:
            table = reference_table()
        check_mapping("with_device", table, {"aten::linear": "CastPolicy.FP32"})
        changed = with_changes(_read_only(table), self.ops)
        return dataclasses.replace(self, tables={**self.tables, device_type: changed})

    def gone(self, device_type: str) -> tuple[str, ...]:
        """Ops in a table that the installed torch does not have, sorted.

        They are kept, and never met: a name from another torch version, or one that a list
        from elsewhere has and torch has removed.
        """
        return tuple(sorted(set(self.tables.get(device_type, ())) - all_ops()))

    def _listed(self) -> set[str]:
        return {op for table in self.tables.values() for op in table}

    def __hash__(self) -> int:
        """Hashes the content, as equality compares it."""
        return hash((self._tables_hash, self.ops, self.modules, self.args, self.rules, self.dtypes))

    @functools.cached_property
    def _tables_hash(self) -> int:
        return hash(frozenset((d, frozenset(t.items())) for d, t in self.tables.items()))

    def __repr__(self) -> str:
        """The name, how many ops each device type has, and how many changes there are."""
        counts = [f"{d}: {len(table)} ops" for d, table in self.tables.items()] or ["no devices"]
        changes = {what: len(getattr(self, what)) for what in ("ops", "modules", "args", "rules")}
        counts += [f"with {what}: {number}" for what, number in changes.items() if number]
        counts += [f"dtype on {device}: {dtype}" for device, dtype in self.dtypes]
        float8, usual = dataclasses.asdict(self.float8), dataclasses.asdict(_FLOAT8)
        counts += [f"float8 {k}: {value}" for k, value in float8.items() if value != usual[k]]
        return f"Policy({self.name!r}, {', '.join(counts)})"

    def __str__(self) -> str:
        """The text of a policy file, which ``loads`` reads."""
        from amp_fx.policies.saved import to_text

        return to_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles plain dictionaries: read-only views cannot be."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restored, (FORMAT, {**fields, "tables": _plain(self.tables)})


def with_changes(table: Table, overrides: Iterable[OpOverride]) -> dict[str, CastPolicy]:
    """A table with what ``with_ops`` laid down."""
    changes = {op: override.policy for override in overrides for op in override.overloads}
    return {**table, **changes}


def _plain(tables: Mapping[str, Table]) -> dict[str, dict[str, CastPolicy]]:
    return {device: dict(table) for device, table in tables.items()}


FORMAT = 1
"""Of pickled policies and of policy files; raised when older ones would be read wrongly."""


def _restored(version: int, fields: dict[str, Any]) -> Policy:
    """A pickled policy.

    Raises:
        PolicyError: Another version of amp_fx has pickled it.
    """
    known = {field.name for field in dataclasses.fields(Policy)}
    if version == FORMAT and known - {"float8"} <= set(fields) <= known:  # older ones lack it
        return Policy(**fields)
    raise PolicyError(
        f"this policy was pickled by another version of amp_fx (format {version}, here "
        f"{FORMAT}); Policy.save and Policy.load carry it over"
    )


def as_policy(policy: object) -> Policy:
    """The policy that somebody means.

    Args:
        policy: A policy, the name of a preset, the path of a policy file (``*.toml``) or the
            text of one. A file is not trusted here (``Policy.load``).

    Raises:
        PolicyError: It is none of these, or the file cannot be read.
    """
    if isinstance(policy, os.PathLike):
        return Policy.load(policy)
    if isinstance(policy, str):
        if "\n" in policy:
            return Policy.loads(policy)
        return Policy.load(policy) if policy.endswith(".toml") else preset(policy)
    if isinstance(policy, Policy) and {f.name for f in dataclasses.fields(Policy)} <= {
        *vars(policy)
    }:
        return policy
    if type(policy).__name__ == Policy.__name__:
        raise PolicyError(
            f"policy={type(policy)!r} belongs to another version of amp_fx, or to a copy of it "
            "that was imported before; Policy.save and Policy.load carry it over"
        )
    raise PolicyError(
        f"policy={policy!r} is not an amp_fx.Policy, the name of a preset "
        f"({', '.join(preset_names())}), or the path of a policy file (*.toml)"
    )


def preset(name: str) -> Policy:
    """A policy by name.

    Args:
        name: ``"torch"`` is what ``torch.autocast`` does in the installed version;
            ``"torch-2.13"`` and its like, what it does in another; ``"ipex"`` takes the CPU
            lists of Intel Extension for PyTorch, and torch's own for all other devices;
            ``"lean"`` is torch's, with norms that take and give low values and residual sums in the
            low dtype; ``"float8-tensorwise"``, ``"float8-rowwise"`` and ``"float8-rowwise-gw-hp"``
            are torch's, with products in float8; ``"router"`` and ``"head"`` are torch's, with
            routers of mixtures of experts, or output heads, that give float32
            (``"lower_precision_wide"``).

    Raises:
        PolicyError: There is no such preset; lists those there are.
    """
    if not isinstance(name, str) or name not in PRESETS:
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
    return tuple(PRESETS)


_added: dict[str, Table] = {}
"""Tables of devices that are not PyTorch's own (``add_device``)."""


@functools.cache
def _build(name: str) -> Policy:
    if name in MODULE_PRESETS:
        return dataclasses.replace(_build("torch").with_modules(MODULE_PRESETS[name]), name=name)
    tables = {**PRESETS[name](), **_added}
    return Policy(name, tables, float8=FLOAT8_PRESETS.get(name, _FLOAT8))


def _read_only(table: Table) -> Table:
    for op, policy in table.items():
        check_entry(op, policy)
    return types.MappingProxyType(dict(table))


def _unknown_preset(name: str) -> str:
    meant = did_you_mean(name, PRESETS)
    return f"there is no preset {name!r}; the presets are {', '.join(PRESETS)}{meant}"

"""Overrides of a policy, on top of op tables: by op, by module and by argument."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from amp_fx.dtypes import as_dtype, is_low
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies.calls import CAST_ARGUMENT_TYPES, has_schema, is_changeable, supports_policy
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import PRODUCTS
from amp_fx.tables.op_names import (
    all_ops,
    find_overloads,
    is_functional,
    op_text,
    overloads_by_packet,
    qualified_pattern,
)
from amp_fx.tables.presets import PRESETS
from amp_fx.tables.products import PRODUCT_POLICIES
from amp_fx.torch_private.ops import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable


ModuleEntry: TypeAlias = "tuple[str, type | str, str]"
"""The path, class and name of a module. Patterns for modules match the path or the name.

The path begins at the root: the compiled module, or a module in a variable of the compiled function
(``0.norm``). The name of a module in a function begins with that variable (``decoder.0.norm``); in
a compiled module, path and name are equal. ``amp_fx.regions.module_paths`` has the entries.

In an exported graph, the class is given by its name."""

ModuleStack: TypeAlias = tuple[ModuleEntry, ...]
"""The modules around an op, outermost first."""

Treatment: TypeAlias = "CastPolicy | str | torch.dtype"
"""A cast policy, its name, or ``torch.float32`` for ``fp32``."""

ModulePolicy: TypeAlias = "Treatment | Mapping[Any, Treatment]"
"""The policy of all ops in a module, or policies by op (``Policy.with_modules``)."""

MODULE_POLICIES = (
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.FP32,
    CastPolicy.PROMOTE,
    CastPolicy.KEEP,
    CastPolicy.SAME_AS_INPUT,
    CastPolicy.LOWER_PRECISION_IO,
    CastPolicy.DEMOTE,
    CastPolicy.FLOAT8,
    CastPolicy.LOWER_PRECISION_WIDE,
)
"""Policies that can apply to all ops of a module. Others require arguments that few ops have."""

SAME_AS = "same_as:"
ARGUMENT_POLICIES = (
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.FP32,
    CastPolicy.KEEP,
    *PRODUCT_POLICIES,
)
_REGEX, _CLASS = "re:", "class:"


@dataclasses.dataclass(frozen=True)
class OpOverride:
    """One entry of ``Policy.with_ops``.

    Attributes:
        pattern: The op as the user wrote it.
        policy: The cast policy of the op.
        overloads: The overloads that match the pattern, by qualified name.
    """

    pattern: str
    policy: CastPolicy
    overloads: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModuleOverride:
    """One entry of ``Policy.with_modules``.

    Attributes:
        pattern: A glob for the path of a module, a regular expression for the whole path, or a
            class. Modules inside a matching module match as well.
        policy: The cast policy of ops in matching modules.
        op: The only op to which the override applies, as the user wrote it; empty for all ops.
        overloads: The overloads that match ``op``, by qualified name.
    """

    pattern: str | re.Pattern[str] | type
    policy: CastPolicy
    op: str = ""
    overloads: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Returns the name of the override in messages and decisions."""
        return f"module {self.text!r}" + (f", op {self.op!r}" if self.op else "")

    def applies_to(self, op: str) -> bool:
        """Returns True if the override applies to an op with this qualified overload name."""
        return not self.op or op in self.overloads

    def matches(self, stack: ModuleStack) -> bool:
        """Returns True if one of the modules around an op matches the pattern."""
        return any(
            self.matches_module(path, cls) or self.matches_module(name, cls)
            for path, cls, name in stack or (("", "", ""),)
        )

    def matches_module(self, path: str, cls: type | str) -> bool:
        """Returns True if a module with this path and class matches the pattern."""
        if isinstance(self.pattern, type):
            return _is_class(cls, self.pattern)
        if isinstance(self.pattern, str):
            return path == self.pattern or fnmatch.fnmatchcase(path, self.pattern)
        return self.pattern.fullmatch(path) is not None

    @property
    def text(self) -> str:
        """Returns the pattern as in policy files: ``decoder.*``, ``re:...`` or ``class:...``."""
        if isinstance(self.pattern, type):
            return f"{_CLASS}{self.pattern.__module__}.{self.pattern.__qualname__}"
        return self.pattern if isinstance(self.pattern, str) else f"{_REGEX}{self.pattern.pattern}"

    def check_name(self) -> None:
        """Checks that the class of the pattern can be found by its name.

        Raises:
            PolicyError: The class is defined in a function, or in a program's main module.
        """
        if not isinstance(self.pattern, type):
            return
        is_found = self.pattern.__module__ != "__main__" and "<locals>" not in self.text
        if not is_found or _imported(self.text) is not self.pattern:
            raise PolicyError(
                f"the class {self.pattern.__name__} cannot be saved, because policy files contain "
                "classes by name: define it at the top level of a module"
            )


@dataclasses.dataclass(frozen=True)
class ArgOverride:
    """One call of ``Policy.with_args``.

    Attributes:
        pattern: The op as the user wrote it.
        args: Pairs of an argument and its policy, or ``same_as:`` and another argument.
        overloads: The overloads that match the pattern, by qualified name.
    """

    pattern: str
    args: tuple[tuple[str, str], ...]
    overloads: tuple[str, ...]


def to_policy(where: str, value: object, allowed: Iterable[CastPolicy] = CastPolicy) -> CastPolicy:
    """Converts the name of a cast policy, or ``torch.float32``, to a cast policy.

    Args:
        where: The beginning of error messages.
        value: A cast policy, its name or a dtype.
        allowed: The cast policies that are allowed.

    Raises:
        PolicyError: The value is not an allowed policy.
    """
    names = [policy.value for policy in allowed]
    name = value.value if isinstance(value, CastPolicy) else value
    if isinstance(name, str) and name.lower() in names:
        return CastPolicy(name.lower())
    dtype = as_dtype(value)
    if dtype is torch.float32 and CastPolicy.FP32.value in names:
        return CastPolicy.FP32
    if dtype is not None and is_low(dtype):  # a policy may be used in regions of either dtype
        low = CastPolicy.LOWER_PRECISION_FP.value
        raise PolicyError(
            f"{where}: got {name!r}, but the autocast region sets the low-precision dtype: write "
            f"{low!r} instead"
        )
    suggestion = "" if dtype is not None else did_you_mean(str(name).lower(), names)
    raise PolicyError(f"{where}: expected one of {', '.join(names)}, got {name!r}{suggestion}")


def check_mapping(method: str, given: object, example: dict[str, str]) -> None:
    """Checks that the argument of a method of policies is a mapping.

    Raises:
        PolicyError: It is not a mapping.
    """
    if not isinstance(given, Mapping):
        raise PolicyError(f"{method} expected a mapping such as {example}, got {given!r}")


def op_overrides(given: Mapping[Any, Treatment], listed: Iterable[str]) -> tuple[OpOverride, ...]:
    """Returns the overrides of one call of ``with_ops``.

    Globs come first, so that names take precedence over them.

    Args:
        given: Policies by op. An op is a packet, an overload or a glob, with or without ``aten::``,
            or the op itself.
        listed: Ops in tables, which may be missing in the installed torch.
    """
    check_mapping("with_ops", given, {"softmax": "fp32"})
    known = frozenset(listed)
    entries = [_op_override(op_text(op), value, known) for op, value in given.items()]
    globs = [entry for entry in entries if is_glob(entry.pattern)]
    names = [entry for entry in entries if not is_glob(entry.pattern)]
    for group in (globs, names):
        _check_contradictions(group)
    return (*globs, *names)


def table_entries(table: Mapping[Any, Treatment]) -> dict[str, CastPolicy]:
    """Returns the cast policies of a table by qualified overload name.

    ``"aten::sum"`` is one overload, the one without a suffix. All names that are not qualified
    names of overloads are those of ``with_ops``, and the qualified names win over them.
    """
    check_mapping("with_device", table, {"aten::linear": "fp32"})
    registered = all_ops()
    namespaces = {name.partition("::")[0] for name in registered}
    exact, others = {}, {}
    for op, value in table.items():
        is_text = isinstance(op, str) and "::" in op and not is_glob(op)
        # A table may list ops of a library that is imported later.
        if is_text and (op in registered or op.partition("::")[0] not in namespaces):
            exact[op] = to_policy(f"op {op!r}", value)
        else:
            others[op] = value
    overrides = op_overrides(others, _listed_by_presets())
    return {op: each.policy for each in overrides for op in each.overloads} | exact


def _op_override(pattern: str, value: Treatment, listed: frozenset[str]) -> OpOverride:
    policy = to_policy(f"op {pattern!r}", value)
    overloads = expand_ops(pattern, listed)
    known = _listed_by_presets()
    supported = tuple(op for op in overloads if supports_policy(op, policy, is_listed=op in known))
    if supported:
        return OpOverride(pattern, policy, supported)
    raise PolicyError(f"op {pattern!r} cannot be {policy.value}: {_why_not(overloads, policy)}")


@functools.cache
def _listed_by_presets() -> frozenset[str]:
    """Returns the ops in the tables of presets, which can be cast even if they return views.

    Tables of the policy itself are not included: the ops that ``with_ops`` accepts must not depend
    on earlier calls, because a policy file may contain the entries in another order.
    """
    tables = (table for make in PRESETS.values() for table in make().values())
    return frozenset(op for table in tables for op in table)


def _why_not(overloads: tuple[str, ...], policy: CastPolicy) -> str:
    names = ", ".join(overloads[:4])
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        return f"{names} has no optional dtype argument"
    if policy is CastPolicy.FP32_APPEND_DTYPE:
        return f"{names} has no equivalent overload with a dtype argument"
    if policy in PRODUCT_POLICIES:
        products = ", ".join(PRODUCT_POLICIES[policy])
        return f"{names} does not support this policy; the supported products are {products}"
    return (
        f"{names} writes to its inputs, returns a view of them or has no tensor inputs, and "
        "autocast never casts the inputs of such ops"
    )


def _check_contradictions(entries: list[OpOverride]) -> None:
    first: dict[str, OpOverride] = {}
    for entry in entries:
        for op in entry.overloads:
            other = first.setdefault(op, entry)
            if other.policy is not entry.policy:
                raise PolicyError(
                    f"{op} has contradictory policies: {other.policy.value} by {other.pattern!r} "
                    f"and {entry.policy.value} by {entry.pattern!r}: remove one of them, or pass "
                    "the one that takes precedence to a later with_ops"
                )


def expand_ops(pattern: str, listed: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the overloads that match a name or a glob: only functional ones, if any match."""
    if not is_glob(pattern):
        return find_overloads(pattern, also=listed)
    glob = qualified_pattern(pattern)
    packets = overloads_by_packet()
    matches = [
        op for packet, ops in packets.items() for op in ops if fnmatch.fnmatchcase(packet, glob)
    ]
    matches += [op for ops in packets.values() for op in ops if fnmatch.fnmatchcase(op, glob)]
    functional = tuple(sorted({op for op in matches if is_functional(op)}))
    if not functional:
        raise PolicyError(f"no op of torch {torch.__version__} matches {pattern!r}")
    return functional


def is_glob(pattern: str) -> bool:
    """Returns True if a pattern for ops contains wildcards."""
    return any(wildcard in pattern for wildcard in "*?[")


def module_overrides(
    given: Mapping[Any, ModulePolicy], listed: Iterable[str]
) -> tuple[ModuleOverride, ...]:
    """Returns the overrides of one call of ``with_modules``.

    Args:
        given: Policies by module. A module is a glob for paths, a compiled regular expression or
            ``"re:..."``, a subclass of ``nn.Module`` or ``"class:package.module.Name"``. A mapping
            sets the policies of single ops in the module.
        listed: Ops in tables, which may be missing in the installed torch.
    """
    check_mapping("with_modules", given, {"decoder.*.norm": "fp32"})
    known = frozenset(listed)
    return tuple(
        override
        for pattern, value in given.items()
        for override in _overrides_of(pattern, value, known)
    )


def _overrides_of(
    pattern: object, value: ModulePolicy, listed: frozenset[str]
) -> Iterable[ModuleOverride]:
    where = f"module {pattern!r}"
    if not isinstance(value, Mapping):
        policy = to_policy(where, value, MODULE_POLICIES)
        return [ModuleOverride(_module_pattern(pattern), policy)]
    ops = [(op_text(op), treatment) for op, treatment in value.items()]
    policies = [
        to_policy(f"{where}, op {op!r}", treatment, MODULE_POLICIES) for op, treatment in ops
    ]
    module_pattern = _module_pattern(pattern)
    return [
        ModuleOverride(module_pattern, policy, op, _changeable(where, op, listed))
        for (op, _), policy in zip(ops, policies, strict=True)
    ]


def _changeable(where: str, op: str, listed: frozenset[str]) -> tuple[str, ...]:
    """Returns the overloads that match an op's name and to which policies of modules apply."""
    overloads = expand_ops(op, listed)
    changeable = tuple(name for name in overloads if is_changeable(name))
    if changeable or not any(has_schema(name) for name in overloads):
        return changeable or overloads
    raise PolicyError(
        f"{where}: op {op!r} is private, writes to its inputs, returns a view of them or has no "
        "tensor inputs: policies of modules only apply to public ops that return new tensors"
    )


_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def _module_pattern(pattern: object) -> str | re.Pattern[str] | type:
    if isinstance(pattern, type):
        if issubclass(pattern, torch.nn.Module):
            return pattern
        raise PolicyError(f"module {pattern!r}: expected a subclass of torch.nn.Module")
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        # Flags as a prefix, because files contain only the text of an expression.
        letters = "".join(letter for letter, flag in _FLAGS.items() if pattern.flags & flag)
        text = re.sub(r"^\(\?[aimsux]+\)", "", pattern.pattern)
        return re.compile(f"(?{letters}){text}") if letters else pattern
    if not isinstance(pattern, str):
        raise PolicyError(
            f"module {pattern!r}: expected a glob for module paths, a compiled regular expression "
            "or a subclass of torch.nn.Module"
        )
    if pattern.startswith(_REGEX):
        return _regex(pattern)
    if pattern.startswith(_CLASS):
        return _module_pattern(_imported(pattern))
    return pattern


def _imported(pattern: str) -> object:
    """Returns the class that a pattern ``class:package.module.Name`` names.

    A policy file must not run code. Only modules that are already imported are searched, and only
    their ``__dict__`` is read, because a module's ``__getattr__`` may import other modules.
    """
    parts = pattern.removeprefix(_CLASS).split(".")
    for split in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:split]))
        for part in parts[split:]:
            value = getattr(value, "__dict__", {}).get(part)
        if value is not None:
            return value
    raise PolicyError(
        f"module {pattern!r}: no imported module has this class: import its module before"
    )


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as error:
        raise PolicyError(f"module {pattern!r} is not a regular expression: {error}") from error


def _is_class(cls: type | str, expected: type) -> bool:
    if isinstance(cls, type):
        return issubclass(cls, expected)
    return cls == f"{expected.__module__}.{expected.__qualname__}"


def arg_override(op: object, args: Mapping[str, Treatment], listed: Iterable[str]) -> ArgOverride:
    """Returns the override of one call of ``with_args``."""
    check_mapping("with_args", args, {"source": "same_as:self"})
    pattern = op_text(op)
    overloads = expand_ops(pattern, listed)
    matching = tuple(op for op in overloads if {*args} <= {*_tensor_arguments(op)})
    if not args or not matching:
        allowed = ", ".join(dict.fromkeys(a for op in overloads for a in _tensor_arguments(op)))
        given = ", ".join(map(repr, args)) or "no arguments"
        raise PolicyError(
            f"op {pattern!r}: expected one of its tensor arguments {allowed}, got {given}"
        )
    entries = tuple(
        (name, _directive(pattern, name, value, matching)) for name, value in args.items()
    )
    for policy in PRODUCT_POLICIES:
        named = tuple(name for name, value in entries if value == policy.value)
        if named:
            _check_operands(pattern, policy, named, matching)
    return ArgOverride(pattern, entries, matching)


def _check_operands(
    pattern: str, policy: CastPolicy, given: tuple[str, ...], overloads: tuple[str, ...]
) -> None:
    """Checks that a policy for products is given for exactly the two operands of a product."""
    products = PRODUCT_POLICIES[policy]
    for op in overloads:
        operands = PRODUCTS[op] if op in products else None
        expected = () if operands is None else (operands.input, operands.weight)
        if not expected or set(given) != set(expected):
            names = " and ".join(expected) or f"both operands of one of {', '.join(products)}"
            raise PolicyError(
                f"op {pattern!r}: expected {policy.value} for {names} and no other argument, got "
                f"{', '.join(given)}"
            )


def _directive(pattern: str, name: str, value: object, overloads: tuple[str, ...]) -> str:
    where = f"argument {name!r} of {pattern!r}"
    if not isinstance(value, str) or not value.startswith(SAME_AS):
        try:
            return to_policy(where, value, ARGUMENT_POLICIES).value
        except PolicyError as error:
            raise PolicyError(f"{error}; or write {SAME_AS}<another argument>") from None
    other = value.removeprefix(SAME_AS)
    allowed = [a for a in _tensor_arguments(overloads[0]) if a != name]
    if any(other not in _tensor_arguments(op) for op in overloads) or other == name:
        raise PolicyError(f"{where}: expected {SAME_AS} and one of {allowed}, got {value!r}")
    return value


def _tensor_arguments(op: str) -> list[str]:
    name, _, overload = op.partition(".")
    schema = schema_of(name, overload)
    return [arg.name for arg in schema.arguments if str(arg.type) in CAST_ARGUMENT_TYPES]

"""A user's changes on top of op tables: by op, by module, by argument, by rule.

Patterns are matched against the module paths that ``explain`` prints.
A path begins at the compiled module: ``decoder.0.norm``. Where a function is compiled, a module
that it calls has its path from the outermost module that is called (``0.norm``, the same in
eager code) and a name that begins with the variable that holds that (``decoder.0.norm``): the
name is printed, and patterns fit either.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from amp_fx.dtypes import as_dtype, is_low
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies.calls import CAST_ARGUMENT_TYPES, has_schema, is_changeable, takes_policy
from amp_fx.policies.files import find_object
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import PRODUCTS
from amp_fx.tables.op_names import (
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
"""A module's path, its class, and its name: the path, in a compiled function from a variable on.

A class is a name where a graph was exported and its classes are not at hand."""

ModuleStack: TypeAlias = tuple[ModuleEntry, ...]
"""The modules around an op, outermost first."""

_ITEM = re.compile(
    r"""\._(?:modules|parameters|buffers)\[(['"])(.*?)\1\]|\[(['"])(.*?)\3\]|\[(\d+)\]"""
)
_CLOSURE = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
"""A variable that a function has from around it: told by the function's own name."""

_WRAPPED = re.compile(r"^(self|fn|mod)(\.|$)")
"""How Dynamo calls the compiled module itself."""


def path_of(stack: ModuleStack) -> str:
    """The path of the innermost module; empty in the outermost one, and outside of any."""
    return stack[-1][0] if stack else ""


def name_of(stack: ModuleStack) -> str:
    """Returns the entry as it is printed."""
    return stack[-1][2] if stack else ""


def module_path(name: str) -> str:
    """``model.layers.0`` for ``L['model']._modules['layers']._modules['0']``, Dynamo's name.

    The ``self`` of a compiled method is left out.
    """
    name = _CLOSURE.sub("", name)
    plain = _ITEM.sub(lambda m: f".{m[2] or m[4] or m[5]}", name)
    return _WRAPPED.sub("", re.sub(r"^[LG](\.|$)", "", plain)).lstrip(".")


def join_path(*parts: str) -> str:
    """Parts of a path, empty ones left out."""
    return ".".join(filter(None, parts))


Treatment: TypeAlias = "CastPolicy | str | torch.dtype"
"""A cast policy, its name, or ``torch.float32`` for ``fp32``."""

Rule: TypeAlias = Callable[[str, str, tuple[Any, ...], tuple[Any, ...]], "Treatment | None"]
"""Called with an op's qualified overload name, the path of the module around it, and the sizes
and dtypes of its tensors; gives a cast policy, its name, or None for no opinion."""

ModulePolicy: TypeAlias = "Treatment | Mapping[Any, Treatment]"
"""What ``Policy.with_modules`` takes for one module: a policy, or policies by op."""

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
    CastPolicy.BFLOAT16X3,
)
"""What can hold for all ops of a module: the others need an argument that few ops have."""

SAME_AS = "same_as:"
ARGUMENT_POLICIES = (
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.FP32,
    CastPolicy.KEEP,
    *PRODUCT_POLICIES,
)
_REGEX, CLASS = "re:", "class:"


@dataclasses.dataclass(frozen=True)
class OpOverride:
    """One entry of ``Policy.with_ops``.

    Attributes:
        pattern: The op as the user wrote it.
        policy: How it is cast.
        overloads: The overloads that this means, by qualified name.
    """

    pattern: str
    policy: CastPolicy
    overloads: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModuleOverride:
    """One entry of ``Policy.with_modules``.

    Attributes:
        pattern: A glob for the path of a module, a regular expression for all of it, or a
            class; modules inside of a module that fits belong to it.
        policy: How the ops are cast that run there.
        op: The op that alone is meant, as the user wrote it; empty for all ops.
        overloads: The overloads that this means, by qualified name.
        why: A reason for people to read, which a policy file gets as a comment.
    """

    pattern: str | re.Pattern[str] | type
    policy: CastPolicy
    op: str = ""
    overloads: tuple[str, ...] = ()
    why: str = dataclasses.field(default="", compare=False)

    @property
    def origin(self) -> str:
        """Its name in messages and decisions."""
        return f"module {self.text!r}" + (f", op {self.op!r}" if self.op else "")

    def holds_for(self, op: str) -> bool:
        """Returns True if an op, by its qualified overload name, is meant."""
        return not self.op or op in self.overloads

    def fits(self, stack: ModuleStack) -> bool:
        """Returns True if one of the modules around an op is meant."""
        return any(
            self.fits_module(path, cls) or self.fits_module(name, cls)
            for path, cls, name in stack or (("", "", ""),)
        )

    def fits_module(self, path: str, cls: type | str) -> bool:
        """Returns True if a module with this path and class is meant."""
        if isinstance(self.pattern, type):
            return _is_class(cls, self.pattern)
        if isinstance(self.pattern, str):
            return path == self.pattern or fnmatch.fnmatchcase(path, self.pattern)
        return self.pattern.fullmatch(path) is not None

    @property
    def text(self) -> str:
        """The pattern as a policy file has it: ``decoder.*``, ``re:...``, ``class:...``."""
        if isinstance(self.pattern, type):
            return f"{CLASS}{self.pattern.__module__}.{self.pattern.__qualname__}"
        return self.pattern if isinstance(self.pattern, str) else f"{_REGEX}{self.pattern.pattern}"


@dataclasses.dataclass(frozen=True)
class RuleOverride:
    """A function of the user's that is asked about every op (``Policy.with_rule``)."""

    function: Rule

    @property
    def name(self) -> str:
        """Its name in messages."""
        return getattr(self.function, "__name__", None) or repr(self.function)

    def at(self, path: str) -> RuleOverride:
        """This rule, told of one module path wherever it is asked."""
        return RuleOverride(_RuleAt(self, path))


@dataclasses.dataclass(frozen=True)
class _RuleAt:
    """A rule that is told of one module path, wherever it is asked."""

    rule: RuleOverride
    path: str

    @property
    def __name__(self) -> str:
        return self.rule.name

    def __call__(self, op: str, _: str, shapes: Any, dtypes: Any) -> Treatment | None:
        return self.rule.function(op, self.path, shapes, dtypes)


@dataclasses.dataclass(frozen=True)
class ArgOverride:
    """One call of ``Policy.with_args``.

    Attributes:
        pattern: The op as the user wrote it.
        args: By argument ``same_as:`` another one, ``fp32``, ``lower_precision_fp`` or ``keep``.
        overloads: The overloads that this means, by qualified name.
    """

    pattern: str
    args: tuple[tuple[str, str], ...]
    overloads: tuple[str, ...]


def to_policy(where: str, value: object, allowed: Iterable[CastPolicy] = CastPolicy) -> CastPolicy:
    """Returns the cast policy that a name or a dtype means; float32 means ``fp32``."""
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
            f"{where}: the region chooses the low-precision dtype, not the policy: write {low!r} "
            f"instead of {name!r}"
        )
    meant = "" if dtype is not None else did_you_mean(str(name).lower(), names)
    raise PolicyError(f"{where}: {name!r} is not one of {', '.join(names)}{meant}")


def check_mapping(method: str, given: object, example: dict[str, str]) -> None:
    """Checks the argument of a method of policies.

    Raises:
        PolicyError: It is no mapping.
    """
    if not isinstance(given, Mapping):
        raise PolicyError(f"{method} got {given!r}; give a mapping, such as {example}")


def op_overrides(given: Mapping[Any, Treatment], listed: Iterable[str]) -> tuple[OpOverride, ...]:
    """The entries of one call of ``with_ops``: globs first, so that names win over them.

    Args:
        given: Policies by op: a packet, an overload or a glob, with or without ``aten::``, or
            the op itself.
        listed: Ops that tables have, perhaps of another torch version.
    """
    check_mapping("with_ops", given, {"softmax": "fp32"})
    known = frozenset(listed)
    entries = [_op_override(op_text(op), value, known) for op, value in given.items()]
    globs = [entry for entry in entries if is_glob(entry.pattern)]
    names = [entry for entry in entries if not is_glob(entry.pattern)]
    for group in (globs, names):
        _refuse_contradictions(group)
    return (*globs, *names)


def _op_override(pattern: str, value: Treatment, listed: frozenset[str]) -> OpOverride:
    policy = to_policy(f"op {pattern!r}", value)
    found = expand_ops(pattern, listed)
    known = _listed_by_presets()
    taking = tuple(op for op in found if takes_policy(op, policy, is_listed=op in known))
    if taking:
        return OpOverride(pattern, policy, taking)
    raise PolicyError(f"op {pattern!r} cannot be {policy.value}: {_why_not(found, policy)}")


@functools.cache
def _listed_by_presets() -> frozenset[str]:
    """Ops of which somebody knows that they can be cast, views among them.

    Not those of a policy's own tables: what ``with_ops`` takes must not depend on the calls
    before it, which a policy file need not give in the same order.
    """
    tables = (table for make in PRESETS.values() for table in make().values())
    return frozenset(op for table in tables for op in table)


def _why_not(overloads: tuple[str, ...], policy: CastPolicy) -> str:
    names = ", ".join(overloads[:4])
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        return f"{names} has no optional dtype argument to set"
    if policy is CastPolicy.FP32_APPEND_DTYPE:
        return f"{names} has no overload that takes a dtype and is otherwise the same"
    if policy in PRODUCT_POLICIES:
        products = ", ".join(PRODUCT_POLICIES[policy])
        why = f"{names} is no product that can have this policy; those are {products}"
        is_grouped = any(PRODUCTS[op].offsets for op in overloads if op in PRODUCTS)
        return f"{why}{_OF_GROUPED if is_grouped else ''}"
    return (
        f"{names} writes to its inputs, gives a view of them or takes no tensor; "
        "autocast leaves such calls alone"
    )


_OF_GROUPED = (
    "; kernels of grouped products return the dtype of their inputs, and torch.bmm can give float32"
)


def _refuse_contradictions(entries: list[OpOverride]) -> None:
    first: dict[str, OpOverride] = {}
    for entry in entries:
        for op in entry.overloads:
            other = first.setdefault(op, entry)
            if other.policy is not entry.policy:
                raise PolicyError(
                    f"{op} is {other.policy.value} by {other.pattern!r} and "
                    f"{entry.policy.value} by {entry.pattern!r}; keep one of them, or give the "
                    "one that must win in a later with_ops"
                )


def expand_ops(pattern: str, listed: Iterable[str] = ()) -> tuple[str, ...]:
    """The overloads that a name or a glob means: the functional ones, if there are any."""
    if not is_glob(pattern):
        return find_overloads(pattern, also=listed)
    glob = qualified_pattern(pattern)
    packets = overloads_by_packet()
    found = [
        op for packet, ops in packets.items() for op in ops if fnmatch.fnmatchcase(packet, glob)
    ]
    found += [op for ops in packets.values() for op in ops if fnmatch.fnmatchcase(op, glob)]
    functional = tuple(sorted({op for op in found if is_functional(op)}))
    if not functional:
        raise PolicyError(f"no op of torch {torch.__version__} matches {pattern!r}")
    return functional


def is_glob(pattern: str) -> bool:
    """Returns True if a pattern for ops may mean several packets."""
    return any(sign in pattern for sign in "*?[")


def module_overrides(
    given: Mapping[Any, ModulePolicy],
    listed: Iterable[str],
    *,
    find_class: Callable[[str], Any] = find_object,
) -> tuple[ModuleOverride, ...]:
    """The entries of one call of ``with_modules``.

    Args:
        given: Policies by module: a glob for paths, a compiled regular expression or
            ``"re:..."``, a subclass of ``nn.Module`` or ``"class:package.module.Name"``. A
            mapping gives policies to single ops inside of the module.
        listed: Ops that tables have, perhaps of another torch version.
        find_class: Finds a class by its name, once the policy of the entry is known to be one.
    """
    check_mapping("with_modules", given, {"decoder.*.norm": "fp32"})
    known = frozenset(listed)
    return tuple(
        override
        for pattern, value in given.items()
        for override in _overrides_of(pattern, value, known, find_class)
    )


def _overrides_of(
    pattern: object, value: ModulePolicy, listed: frozenset[str], find_class: Callable[[str], Any]
) -> Iterable[ModuleOverride]:
    where = f"module {pattern!r}"
    if not isinstance(value, Mapping):
        policy = to_policy(where, value, MODULE_POLICIES)
        return [ModuleOverride(_module_pattern(pattern, find_class), policy)]
    ops = [(op_text(op), each) for op, each in value.items()]
    policies = [to_policy(f"{where}, op {op!r}", each, MODULE_POLICIES) for op, each in ops]
    found = _module_pattern(pattern, find_class)
    return [
        ModuleOverride(found, policy, op, _changeable(where, op, listed))
        for (op, _), policy in zip(ops, policies, strict=True)
    ]


def _changeable(where: str, op: str, listed: frozenset[str]) -> tuple[str, ...]:
    """The overloads that an op's name means, of those that what holds for a module holds for."""
    found = expand_ops(op, listed)
    changeable = tuple(name for name in found if is_changeable(name))
    if changeable or not any(has_schema(name) for name in found):
        return changeable or found
    raise PolicyError(
        f"{where}: op {op!r} is private, writes to its inputs, gives a view of them or takes no "
        "tensor; what holds for a module is for public ops that make new tensors"
    )


def _module_pattern(
    pattern: object, find_class: Callable[[str], Any]
) -> str | re.Pattern[str] | type:
    if isinstance(pattern, type):
        if issubclass(pattern, torch.nn.Module):
            return pattern
        raise PolicyError(f"module {pattern!r} is a class, but not one of torch.nn.Module")
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    if not isinstance(pattern, str):
        raise PolicyError(
            f"module {pattern!r} is neither the path of modules (globs are allowed), nor a "
            "regular expression, nor a class of modules"
        )
    if pattern.startswith(_REGEX):
        return _regex(pattern)
    if pattern.startswith(CLASS):
        return _module_pattern(find_class(pattern.removeprefix(CLASS)), find_class)
    return pattern


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as error:
        raise PolicyError(f"module {pattern!r} is not a regular expression: {error}") from error


def _is_class(cls: type | str, wanted: type) -> bool:
    if isinstance(cls, type):
        return issubclass(cls, wanted)
    return cls == f"{wanted.__module__}.{wanted.__qualname__}"


def rule_override(function: object) -> RuleOverride:
    """A user's function as an override."""
    if isinstance(function, str):
        function = find_object(function)
    if not callable(function) or isinstance(function, type):
        raise PolicyError(
            f"rule {function!r} is not a function: give one of (op, module_path, shapes, dtypes)"
        )
    return RuleOverride(function)


def arg_override(op: object, args: Mapping[str, Treatment], listed: Iterable[str]) -> ArgOverride:
    """The entry that a call of ``with_args`` makes."""
    check_mapping("with_args", args, {"source": "same_as:self"})
    pattern = op_text(op)
    found = expand_ops(pattern, listed)
    taking = tuple(op for op in found if {*args} <= {*_tensor_arguments(op)})
    if not args or not taking:
        allowed = ", ".join(dict.fromkeys(a for op in found for a in _tensor_arguments(op)))
        given = ", ".join(map(repr, args)) or "no arguments"
        raise PolicyError(f"op {pattern!r} with {given}: its tensor arguments are {allowed}")
    entries = tuple(
        (name, _directive(pattern, name, value, taking)) for name, value in args.items()
    )
    for policy in PRODUCT_POLICIES:
        named = tuple(name for name, value in entries if value == policy.value)
        if named:
            _check_operands(pattern, policy, named, taking)
    return ArgOverride(pattern, entries, taking)


def _check_operands(
    pattern: str, policy: CastPolicy, given: tuple[str, ...], overloads: tuple[str, ...]
) -> None:
    """Refuses a policy for products on one argument alone: it is about both operands."""
    products = PRODUCT_POLICIES[policy]
    for op in overloads:
        operands = PRODUCTS[op] if op in products else None
        wanted = () if operands is None else (operands.input, operands.weight)
        if not wanted or set(given) != set(wanted):
            both = " and ".join(wanted) or f"both operands of one of {', '.join(products)}"
            raise PolicyError(
                f"op {pattern!r} with {', '.join(given)} as {policy.value}: name {both}, and no "
                "others"
            )


def _directive(pattern: str, name: str, value: object, overloads: tuple[str, ...]) -> str:
    where = f"argument {name!r} of {pattern!r}"
    if not isinstance(value, str) or not value.startswith(SAME_AS):
        try:
            return to_policy(where, value, ARGUMENT_POLICIES).value
        except PolicyError as error:
            raise PolicyError(f"{error}; or {SAME_AS}<another argument>") from None
    other = value.removeprefix(SAME_AS)
    allowed = [a for a in _tensor_arguments(overloads[0]) if a != name]
    if any(other not in _tensor_arguments(op) for op in overloads) or other == name:
        raise PolicyError(f"{where}: {value!r} does not name another of its tensors: {allowed}")
    return value


def _tensor_arguments(op: str) -> list[str]:
    name, _, overload = op.partition(".")
    schema = schema_of(name, overload)
    return [arg.name for arg in schema.arguments if str(arg.type) in CAST_ARGUMENT_TYPES]

"""Selects the override of a policy that applies to a call, and applies it to the call.

Later overrides win over earlier ones, and module overrides win over op overrides. Module overrides
apply only to ops that return new tensors: a cast would detach a view from its base, and in-place
calls, ``out=`` calls and calls with ``dtype=`` determine their dtype themselves. Such calls follow
the policy of the op.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.policies.calls import (
    apply_policy,
    bind,
    cast_arguments,
    castable_tensors,
    input_dtype,
    is_changeable,
    is_eligible,
    lower_first,
    qualified_name,
    result_dtype,
)
from amp_fx.policies.changes import SAME_AS
from amp_fx.policies.float8 import operands_of
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.products import PRODUCT_POLICIES
from amp_fx.tables.registered import REGISTERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.policies.changes import ArgOverride, ModuleOverride, ModuleStack, OpOverride
    from amp_fx.tables.cast_policy import Table
    from amp_fx.torch_private.ops import OpOverload


@dataclasses.dataclass(frozen=True)
class Decision:
    """The cast policy of one call.

    Attributes:
        policy: The cast policy.
        origin: The source of the policy in messages: ``"table"``, ``"op 'softmax'"``,
            ``"module 'decoder.*'"``, ``"args 'cat'"`` or ``"register_op"``.
        args: Policies of single arguments, as in ``Policy.with_args``.
    """

    policy: CastPolicy
    origin: str
    args: tuple[tuple[str, str], ...] = ()

    def apply(
        self, call: Call, device_type: str, low_dtype: torch.dtype
    ) -> tuple[Call, torch.dtype | None]:
        """Applies the decision to a call.

        Returns:
            The call with its casts (``call`` itself if nothing changes), and the dtype for
            ``restore_results``.

        Raises:
            UnsupportedError: The op is banned.
        """
        dtype = None
        if self.policy in _RESTORING:
            # The caller asks for a dtype, in which the result must stay.
            if has_explicit_dtype(call):
                return call, None
            if self.policy is CastPolicy.LOWER_PRECISION_IO:
                call = lower_first(call, device_type, low_dtype)
            dtype = result_dtype(call, device_type)
        # The policies of arguments replace the op's. ``same_as`` reads the dtype of another
        # argument after its cast, so these casts come last.
        skipped = [name for name, _ in self.args]
        call = apply_policy(self.policy, call, device_type, low_dtype, skipped=skipped)
        if self.args:
            call = cast_arguments(call, self._argument_dtypes(call, low_dtype), device_type)
        return call, dtype

    def _argument_dtypes(self, call: Call, low_dtype: torch.dtype) -> dict[str, torch.dtype]:
        bound = bind(*call)
        dtypes = {}
        for name, directive in self.args:
            other = bound.get(directive.removeprefix(SAME_AS))
            if directive.startswith(SAME_AS) and isinstance(other, torch.Tensor):
                dtypes[name] = other.dtype
            elif not directive.startswith(SAME_AS) and directive != CastPolicy.KEEP.value:
                dtypes[name] = input_dtype(CastPolicy(directive), low_dtype)
        # A cast to the dtype of an integer tensor would lose the fractions.
        return {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}


_RESTORING = (CastPolicy.SAME_AS_INPUT, CastPolicy.LOWER_PRECISION_IO)
"""Policies that cast results to the dtype of an input."""


def has_explicit_dtype(call: Call) -> bool:
    """Returns True if the ``dtype`` argument of a call is given."""
    return bind(*call).get("dtype") is not None


class Resolver:
    """Selects the cast policy of each call from the tables and overrides of a policy."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        ops: Iterable[OpOverride],
        modules: tuple[ModuleOverride, ...],
        args: Sequence[ArgOverride],
    ) -> None:
        self._tables = tables
        self._modules = modules
        # For messages. ``tables`` has the policies of these ops already.
        self._op_origins = {
            op: f"op {override.pattern!r}" for override in ops for op in override.overloads
        }
        self._args: dict[str, tuple[str, dict[str, str]]] = {}
        # Later calls of ``with_args`` replace the policies of the arguments that they name.
        for override in args:
            for op in override.overloads:
                _, before = self._args.get(op, ("", {}))
                origin = f"args {override.pattern!r}"
                self._args[op] = origin, {**before, **dict(override.args)}
        float8 = CastPolicy.FLOAT8
        self.has_float8 = (
            any(float8 is p for table in tables.values() for p in table.values())
            or any(float8 is override.policy for override in modules)
            or any(float8.value in dict(override.args).values() for override in args)
        )
        self.depends_on_module = bool(modules)  # whether a decision can
        self._by_op = functools.cache(self._find_by_op)
        self.module_overrides = functools.cache(self._find_module_overrides)

    def stack_key(self, stack: ModuleStack) -> object:
        """Returns a key that is equal for two module stacks with equal decisions for all calls.

        The key also holds for another policy that differs in its modules alone.
        """
        return self.module_overrides(stack) if self._modules else ()

    def decide(self, call: Call, device_type: str, stack: ModuleStack) -> Decision | None:
        """Returns the decision for a call, or None if the policy has no entry for its op."""
        # The table of registered ops only grows: a decision is stale if its size has changed.
        by_op: Decision | None = self._by_op(call[0], device_type, len(REGISTERED))
        if not self.depends_on_module or not self._is_adjustable(call, device_type, by_op):
            return by_op
        overrides: tuple[ModuleOverride, ...] = self.module_overrides(stack)
        name = qualified_name(call[0])
        override = next((m for m in overrides if m.applies_to(name)), None)
        if override is None or not _suits(override.policy, call[0]):
            return by_op
        return Decision(override.policy, override.origin)

    def _is_adjustable(self, call: Call, device_type: str, by_op: Decision | None) -> bool:
        if by_op is None and not is_adjustable(call[0]):
            return False
        if has_explicit_dtype(call):
            return False
        return any(is_eligible(t, device_type) for t in castable_tensors(call))

    def _find_by_op(self, op: OpOverload, device_type: str, _: int) -> Decision | None:
        name = qualified_name(op)
        policy = self._tables.get(device_type, {}).get(name)
        origin, args = self._args.get(name, ("", {}))
        # A product is computed as a whole, so its operands cannot have this policy one by one.
        product = _product_policy(op, args) if args else None
        if product is not None:
            return Decision(product, origin)
        if policy is not None:
            return Decision(policy, self._op_origins.get(name, "table"), tuple(args.items()))
        # A registration holds under every policy, unless the policy itself lists the op.
        registered = REGISTERED.get(name)
        if registered is not None:
            merged = {**dict(registered.args), **args}
            return Decision(registered.policy, "register_op", tuple(merged.items()))
        return Decision(CastPolicy.KEEP, origin, tuple(args.items())) if args else None

    def _find_module_overrides(self, stack: ModuleStack) -> tuple[ModuleOverride, ...]:
        """Returns the matching overrides in order of precedence, up to the first for all ops."""
        matching: list[ModuleOverride] = []
        for override in reversed(self._modules):
            if override.matches(stack):
                matching.append(override)
                # An override for all ops hides the earlier ones.
                if not override.op:
                    break
        return tuple(matching)


@functools.cache
def is_adjustable(op: OpOverload) -> bool:
    """Returns True if policies of modules apply to an op (``is_changeable``, cached)."""
    return is_changeable(qualified_name(op))


def _product_policy(op: OpOverload, args: Mapping[str, str]) -> CastPolicy | None:
    """Returns the policy that ``with_args`` sets for both operands of a product, if any."""
    operands = operands_of(op)
    if operands is None:
        return None
    given = {args.get(name) for name in (operands.input, operands.weight)}
    return next((policy for policy in PRODUCT_POLICIES if given == {policy.value}), None)


def _suits(policy: CastPolicy, op: OpOverload) -> bool:
    """Returns False if a policy is for products and does not support the op."""
    products = PRODUCT_POLICIES.get(policy)
    return products is None or qualified_name(op) in products

"""Applies a cast policy to one call of one op, exactly like ATen's autocast wrappers.

Source: ``WrapFunction_`` and its helpers in ``ATen/autocast_mode.h``. The functions have no state
and know no graph: tracing calls them to insert casts into a graph, and eager code calls them to run
under a policy.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import UnsupportedError
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.products import PRODUCT_POLICIES
from amp_fx.torch_private import pytree
from amp_fx.torch_private.ops import has_kernels, schema_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amp_fx.torch_private.ops import OpOverload

    Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

aten = torch.ops.aten
TO_COPY = aten._to_copy.default
"""The op of every inserted cast."""

# The overloads with a dtype argument that fp32_append_dtype calls (autocast_mode.h,
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE).
_WITH_DTYPE = {
    "aten::norm.Scalar": "ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
}

_BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


def qualified_name(op: OpOverload) -> str:
    """Returns the name of an overload in the dispatcher, such as ``aten::softmax.int``."""
    return str(op.name())  # type: ignore[no-untyped-call]


def is_eligible(tensor: torch.Tensor, device_type: str) -> bool:
    """Returns True for a floating-point tensor on the device, except float64.

    Autocast casts only such tensors.
    """
    return (
        tensor.device.type == device_type
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def reaches_autocast(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> bool:
    """Returns True if the dispatcher calls the autocast kernel of a device type.

    It does if any tensor of the call is on such a device, whether or not autocast may cast it.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(t, torch.Tensor) and t.device.type == device_type for t in leaves)


def apply_policy(
    policy: CastPolicy,
    call: Call,
    device_type: str,
    low_dtype: torch.dtype,
    *,
    skipped: Collection[str] = (),
) -> Call:
    """Applies a cast policy to a call.

    Args:
        policy: The cast policy of the op.
        call: The op and its arguments.
        device_type: The device type of the autocast region.
        low_dtype: The low-precision dtype of the region.
        skipped: Names of arguments that are not cast.

    Returns:
        The call with its casts, or ``call`` itself if nothing changes.

    Raises:
        UnsupportedError: The policy is ``BANNED``.
    """
    if policy is CastPolicy.KEEP:
        return call
    if policy is CastPolicy.DEMOTE and not _is_demoted(call, device_type, low_dtype):
        return call
    if policy is CastPolicy.BANNED:
        raise UnsupportedError(banned_message(call[0]))
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        return _set_opt_dtype(call, device_type)
    if policy is CastPolicy.FP32_APPEND_DTYPE:
        return _append_dtype(call, device_type)
    if policy is CastPolicy.PROMOTE:
        dtype = promoted_dtype(call, device_type, low_dtype, skipped=skipped)
    else:
        dtype = input_dtype(policy, low_dtype)
    names = [name for name in castable_arguments(call[0]) if name not in skipped]
    return cast_arguments(call, dict.fromkeys(names, dtype), device_type)


def lower_first(call: Call, device_type: str, low_dtype: torch.dtype) -> Call:
    """Casts the first tensor argument to the low dtype, as ``lower_precision_io`` requires."""
    first = castable_arguments(call[0])[:1]
    return cast_arguments(call, dict.fromkeys(first, low_dtype), device_type)


def result_dtype(call: Call, device_type: str) -> torch.dtype | None:
    """Returns the dtype to which ``same_as_input`` and ``lower_precision_io`` cast results.

    Returns:
        The dtype of the first eligible input, or None if results are not cast because the first
        input is float32 or does not exist.
    """
    first = next((t for t in castable_tensors(call) if is_eligible(t, device_type)), None)
    return None if first is None or first.dtype == torch.float32 else first.dtype


def restore_results(results: Any, dtype: torch.dtype | None) -> Any:
    """Casts float32 results to the dtype that ``result_dtype`` returned."""
    if dtype is None:
        return results

    def restore(value: Any) -> Any:
        is_float32 = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_float32 else value

    return pytree.tree_map(restore, results)


def banned_message(op: OpOverload) -> str:
    """Returns the error message for a banned op, which is PyTorch's own if PyTorch bans it."""
    if qualified_name(op) == "aten::binary_cross_entropy":
        return _BANNED_MESSAGE
    return f"{qualified_name(op)} is banned by the policy: call it outside the autocast region"


def promoted_dtype(
    call: Call, device_type: str, low_dtype: torch.dtype, *, skipped: Collection[str] = ()
) -> torch.dtype:
    """Returns the dtype to which a ``promote`` op casts its inputs.

    This is the low dtype if all inputs have it, and float32 otherwise. Like ATen, ignores arguments
    that may be None, such as the bias of ``bilinear``. ATen raises an error for an input of the
    other low dtype (``at::autocast::prioritize``); here, such inputs are cast to float32, which
    represents all their values.
    """
    optional = [a.name for a in call[0]._schema.arguments if str(a.type) == "Optional[Tensor]"]
    tensors = castable_tensors(call, skipped=(*skipped, *optional))
    tensors = [t for t in tensors if is_eligible(t, device_type)]
    return low_dtype if all(t.dtype == low_dtype for t in tensors) else torch.float32


_LOWERING = (
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.DEMOTE,
    CastPolicy.FLOAT8,
    CastPolicy.LOWER_PRECISION_WIDE,
)


def input_dtype(policy: CastPolicy, low_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to which a policy casts all inputs."""
    return low_dtype if policy in _LOWERING else torch.float32


def _is_demoted(call: Call, device_type: str, low_dtype: torch.dtype) -> bool:
    """Returns True if ``demote`` casts the inputs of a call.

    It does if all inputs are eligible and have the same shape, and one has the low dtype.
    """
    tensors = castable_tensors(call)
    if not tensors or not all(is_eligible(t, device_type) for t in tensors):
        return False
    shape = tensors[0].shape
    is_one_shape = len(shape) > 1 and all(t.shape == shape for t in tensors)
    return is_one_shape and any(t.dtype == low_dtype for t in tensors)


def _set_opt_dtype(call: Call, device_type: str) -> Call:
    op, args, kwargs = call
    bound = bind(op, args, kwargs)
    first = next(iter(bound.values()))
    if not isinstance(first, torch.Tensor) or not is_eligible(first, device_type):
        return call
    if bound.get("dtype") is not None:
        return call
    # The caller may have passed None by position.
    return unbind(op, {**bound, "dtype": torch.float32})


def _append_dtype(call: Call, device_type: str) -> Call:
    op, args, kwargs = call
    first: torch.Tensor = next(iter(bind(op, args, kwargs).values()))
    dtype = torch.float32 if is_eligible(first, device_type) else first.dtype
    overload = getattr(op.overloadpacket, _WITH_DTYPE[qualified_name(op)])
    return unbind(overload, {**_defaults(op), **bind(op, args, kwargs), "dtype": dtype})


def cast_arguments(call: Call, dtypes: Mapping[str, torch.dtype], device_type: str) -> Call:
    """Casts eligible tensors of a call to the dtypes given per argument.

    Returns:
        The call with its casts, or ``call`` itself if nothing changes.
    """
    op, args, kwargs = call

    def cast_one(value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or not is_eligible(value, device_type):
            return value
        # The op that autograd records for ``value.to(dtype)``. Decompositions do not call it
        # directly, so that it identifies inserted casts.
        return value if value.dtype == dtype else TO_COPY(value, dtype=dtype)

    changed = False
    bound = bind(op, args, kwargs)
    # ATen's casts are arguments of one C++ call, which GCC evaluates from right to left. If one
    # tensor is passed twice, the order of its casts determines the order in which gradients add up.
    for name in reversed([name for name in castable_arguments(op) if name in dtypes]):
        leaves, spec = pytree.tree_flatten(bound.get(name))
        new = [cast_one(leaf, dtypes[name]) for leaf in leaves]
        if any(map(operator.is_not, leaves, new)):
            bound[name], changed = pytree.tree_unflatten(new, spec), True
    return unbind(op, bound) if changed else call


def castable_tensors(call: Call, *, skipped: Collection[str] = ()) -> list[torch.Tensor]:
    """Returns the tensors among the castable arguments of a call, in order."""
    op, args, kwargs = call
    bound = bind(op, args, kwargs)
    values = [bound.get(name) for name in castable_arguments(op) if name not in skipped]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


CAST_ARGUMENT_TYPES = ("Tensor", "Optional[Tensor]", "List[Tensor]")
"""Schema types of arguments that autocast casts."""


def castable_arguments(op: OpOverload) -> list[str]:
    """Returns the names of arguments with a type for which ATen's ``cached_cast`` has an overload.

    These are Tensor, Tensor? and Tensor[]. A ``Tensor?[]`` (the indices of ``index_put``) is not
    cast. For ops with running statistics, which are in no table of PyTorch, only the input is
    castable: the ops write to the statistics although their schema does not say so, and would write
    to the cast instead.
    """
    arguments = op._schema.arguments
    names = [arg.name for arg in arguments if str(arg.type) in CAST_ARGUMENT_TYPES]
    return names[:1] if "running_mean" in names else names


def supports_policy(op: str, policy: CastPolicy, *, is_listed: bool = False) -> bool:
    """Returns True if an op overload supports a cast policy."""
    name, _, overload = op.partition(".")
    if not has_kernels(op) and not has_schema(op):
        return True
    schema = schema_of(name, overload)
    if schema.is_mutable:
        return False
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        return any(arg.name == "dtype" and arg.default_value is None for arg in schema.arguments)
    if policy is CastPolicy.FP32_APPEND_DTYPE:
        return op in _WITH_DTYPE
    if policy in PRODUCT_POLICIES:
        return op in PRODUCT_POLICIES[policy]
    if policy in (CastPolicy.KEEP, CastPolicy.BANNED) or is_listed:
        return any(str(arg.type) in CAST_ARGUMENT_TYPES for arg in schema.arguments)
    return computes(schema)


def has_schema(op: str) -> bool:
    """Returns True if an op overload with this qualified name is registered."""
    name, _, overload = op.partition(".")
    try:
        schema_of(name, overload)
    except RuntimeError:
        return False
    return True


def is_changeable(op: str) -> bool:
    """Returns True if the policy of a module applies to an op overload with this qualified name.

    It does not apply to private ops, into which public ops decompose, unless a table lists them.
    """
    if not has_schema(op) or op.partition("::")[2].startswith("_"):
        return False
    name, _, overload = op.partition(".")
    return computes(schema_of(name, overload))


def computes(schema: torch.FunctionSchema) -> bool:
    """Returns True if an op computes new tensors from tensors, without views or writes.

    A view of a cast would no longer alias its base.
    """
    if any(arg.alias_info is not None for arg in schema.arguments):
        return False
    has_input = any(str(arg.type) in CAST_ARGUMENT_TYPES for arg in schema.arguments)
    return has_input and any("Tensor" in str(result.type) for result in schema.returns)


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, without defaults."""
    names = [arg.name for arg in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_arguments(op: OpOverload) -> list[str]:
    """Returns the names of arguments that an op writes to according to its schema."""
    arguments = op._schema.arguments
    return [arg.name for arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


def _defaults(op: OpOverload) -> dict[str, Any]:
    return {arg.name: arg.default_value for arg in op._schema.arguments if arg.has_default_value()}


def unbind(op: OpOverload, bound: dict[str, Any]) -> Call:
    """Returns a call with named arguments, passed by position up to the first omitted one."""
    args: list[Any] = []
    remaining = dict(bound)
    for arg in op._schema.arguments:
        if arg.kwarg_only or arg.name not in remaining:
            break
        args.append(remaining.pop(arg.name))
    return op, tuple(args), remaining

"""What a cast policy does to one call of one op, exactly as ATen's wrappers do it.

Source: ``WrapFunction_`` and its helpers in ``ATen/autocast_mode.h``. Everything here is
about values: no graph, no state. Tracing under these rules gives a graph with casts;
running under them gives eager autocast with a policy of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.cast_policy import CastPolicy
from amp_fx.errors import BannedOpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
    CastFn = Callable[[torch.Tensor, torch.dtype], torch.Tensor]

_aten = torch.ops.aten

# fp32_append_dtype: the overload that takes the dtype (autocast_mode.h,
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
    """An overload's name as the dispatcher registers it: ``aten::softmax.int``."""
    return str(op.name())  # type: ignore[no-untyped-call]


def is_eligible(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether autocast of a device type may cast this tensor: floating point, not float64."""
    return (
        tensor.device.type == device_type
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def reaches_autocast(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> bool:
    """Whether the dispatcher would reach the autocast kernel of a device type.

    It does if any tensor of the call, eligible or not, lives on such a device.
    """
    return any(_on_device(arg, device_type) for arg in (*args, *kwargs.values()))


def _on_device(arg: object, device_type: str) -> bool:
    if isinstance(arg, torch.Tensor):
        return arg.device.type == device_type
    if isinstance(arg, (list, tuple)):
        return any(_on_device(item, device_type) for item in arg)
    return False


def apply_policy(
    policy: CastPolicy, call: Call, device_type: str, low_dtype: torch.dtype, cast: CastFn
) -> Call:
    """One call as autocast would make it.

    Args:
        policy: The op's policy on this device type.
        call: ``(op, args, kwargs)``; arguments are tensors (real or fake) and constants.
        device_type: Only tensors on this device type are cast.
        low_dtype: What ``lower_precision_fp`` casts to.
        cast: Makes the cast of one tensor to one dtype.

    Returns:
        The call to make instead; the same object if nothing changes.

    Raises:
        BannedOpError: The op is banned, with the advice that PyTorch gives.
    """
    if policy is CastPolicy.BANNED:
        raise BannedOpError(_BANNED_MESSAGE)
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        return _set_opt_dtype(call, device_type)
    if policy is CastPolicy.FP32_APPEND_DTYPE:
        return _append_dtype(call, device_type)
    if policy is CastPolicy.PROMOTE:
        return _cast_inputs(call, device_type, promoted_dtype(call, device_type, low_dtype), cast)
    dtype = low_dtype if policy is CastPolicy.LOWER_PRECISION_FP else torch.float32
    return _cast_inputs(call, device_type, dtype, cast)


def promoted_dtype(call: Call, device_type: str, low_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a ``promote`` op runs: the low dtype if all inputs have it.

    ATen raises on a third reduced dtype (``at::autocast::prioritize``); float32 holds
    every value of both, so that is what it becomes here.
    """
    tensors = [t for t in _castable_tensors(call) if is_eligible(t, device_type)]
    return low_dtype if all(t.dtype == low_dtype for t in tensors) else torch.float32


def _set_opt_dtype(call: Call, device_type: str) -> Call:
    op, args, kwargs = call
    bound = _bind(op, args, kwargs)
    first = next(iter(bound.values()))
    if not isinstance(first, torch.Tensor) or not is_eligible(first, device_type):
        return call
    if bound.get("dtype") is not None:
        return call
    # The argument may have been given as a positional None.
    return _unbind(op, {**bound, "dtype": torch.float32})


def _append_dtype(call: Call, device_type: str) -> Call:
    op, args, kwargs = call
    first: torch.Tensor = next(iter(_bind(op, args, kwargs).values()))
    dtype = torch.float32 if is_eligible(first, device_type) else first.dtype
    overload = getattr(op.overloadpacket, _WITH_DTYPE[qualified_name(op)])
    return _unbind(overload, {**_defaults(op), **_bind(op, args, kwargs), "dtype": dtype})


def _cast_inputs(call: Call, device_type: str, dtype: torch.dtype, cast: CastFn) -> Call:
    op, args, kwargs = call

    def cast_one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_eligible(value, device_type):
            return value
        return value if value.dtype == dtype else cast(value, dtype)

    changed = False
    bound = _bind(op, args, kwargs)
    # ATen's casts are arguments of one C++ call, which GCC evaluates from right to left;
    # where one tensor feeds two arguments, their order is that of the gradients' sum.
    for name in reversed(_castable_arguments(op)):
        value = bound.get(name)
        new = [cast_one(v) for v in value] if isinstance(value, (list, tuple)) else cast_one(value)
        if _differs(value, new):
            bound[name], changed = new, True
    return _unbind(op, bound) if changed else call


def _differs(old: Any, new: Any) -> bool:
    if isinstance(new, list):
        return any(a is not b for a, b in zip(old, new, strict=True))
    return old is not new


def _castable_tensors(call: Call) -> list[torch.Tensor]:
    op, args, kwargs = call
    bound = _bind(op, args, kwargs)
    values = [bound.get(name) for name in _castable_arguments(op)]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _castable_arguments(op: OpOverload) -> list[str]:
    """Arguments that ``cached_cast`` has an overload for: Tensor, Tensor?, Tensor[].

    A ``Tensor?[]`` (the indices of ``index_put``) goes through its catch-all, uncast.
    """
    types = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    return [arg.name for arg in op._schema.arguments if str(arg.type) in types]


def _bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [arg.name for arg in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _defaults(op: OpOverload) -> dict[str, Any]:
    return {arg.name: arg.default_value for arg in op._schema.arguments if arg.has_default_value()}


def _unbind(op: OpOverload, bound: dict[str, Any]) -> Call:
    """Arguments by name as ``(args, kwargs)``: positional up to the first one left out."""
    args: list[Any] = []
    rest = dict(bound)
    for arg in op._schema.arguments:
        if arg.kwarg_only or arg.name not in rest:
            break
        args.append(rest.pop(arg.name))
    return op, tuple(args), rest

"""Branches and loops of torch as what they are in eager code, so that ops inside are seen.

Without a compiler ``torch.cond`` traces its branches, and modes see one op that holds a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def eager_form(op: Any) -> Callable[..., Any] | None:
    """What runs a higher-order op as eager code does; None for what is none, or not known."""
    if not isinstance(op, torch._ops.HigherOrderOperator):
        return None
    return _FORMS.get(str(op))


def _cond(
    predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any
) -> Any:
    return true_fn(*operands) if predicate else false_fn(*operands)


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, others: Any
) -> Any:
    while cond_fn(*carried, *others):
        carried = body_fn(*carried, *others)
    return tuple(carried)


def _map(function: Callable[..., Any], rows: Any, others: Any) -> Any:
    from torch._higher_order_ops.map import map_dense

    return map_dense(function, rows, others)


def _scan(function: Callable[..., Any], carried: Any, rows: Any, others: Any) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(function, carried, rows, additional_inputs=others)


def _flex_attention(query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
    """The one with matrix products; relies on the name of that function, and casts as autocast."""
    from torch._higher_order_ops.flex_attention import sdpa_dense

    query, key, value = _as_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        return sdpa_dense(query, key, value, *others, **options)


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t.to(dtype) if t.dtype == torch.float32 else t for t in tensors]


_FORMS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "map_impl": _map,
    "scan": _scan,
    "flex_attention": _flex_attention,
}

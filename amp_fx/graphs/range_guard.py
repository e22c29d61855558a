"""Handles numbers in a program that overflow or flush to zero in the low dtype.

``scores.masked_fill(mask, -1e9)`` and ``x / (y + 1e-8)`` are correct in float32. If the rewrite
lowers a tensor that the program computes in float32, ``clamp_fill_value`` clamps fill values and
``reason_for_float32`` rejects the low dtype for arithmetic. If the program lowers the tensor itself
(under an ambient region), results match eager autocast, including infinities.

Left alone on purpose: in-place arithmetic, which cannot change its dtype; tensors with more than
one element; parameters and buffers, whose values are unknown during compilation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.casts import inserted_cast, is_widening
from amp_fx.graphs.metadata import CAPTURED, RANGE_NOTE, VALUE
from amp_fx.graphs.values import dtypes_differ, tensors_in
from amp_fx.torch_private.ops import OpOverload

_REFUSED = ("masked_fill", "index_fill", "fill", "full_like", "new_full", "clamp", "clip")
"""Ops whose eager kernels raise if a number overflows."""
_FILLS = (*_REFUSED, "where", "clamp_min", "clamp_max")
_LIMITS = ("clamp", "clip", "clamp_min", "clamp_max")
"""Ops with limits. A limit may flush to zero but never overflows: it is clamped before."""
_ARITHMETIC = ("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv")
_CREATIONS = {"full": 1, "scalar_tensor": 0, "tensor": 0}
"""Functions that create constant tensors, with the position of the number."""


def clamp_fill_value(node: fx.Node) -> None:
    """Clamps numbers that a node writes into tensors to the range of the low dtype.

    Only clamps if the rewrite lowered the tensor, or if the eager kernel would raise.
    """
    name = name_of(node).removesuffix("_")
    low = _low_dtype(node) if name in _FILLS else None
    if low is None:
        return
    if not any(map(_is_narrower, node.all_input_nodes)) and name not in _REFUSED:
        if problems := _problems(node, low, flushes_only=False):
            record_range(node, f"{problems}, as in eager autocast")
        return
    limit = torch.finfo(low).max
    clamped: list[str] = []

    def clamp(arg: Any) -> Any:
        number = _number(arg)
        if number is None or abs(number) <= limit or not math.isfinite(number):
            return arg
        # An int stays an int, because the type of a number takes part in type promotion.
        bound = type(number)(math.copysign(limit, number))
        clamped.append(f"{number:g} clamped to {bound:g}, the limit of {dtype_name(low)}")
        return bound

    node.args = map_aggregate(node.args, clamp)
    node.kwargs = map_aggregate(node.kwargs, clamp)
    if clamped:
        record_range(node, "; ".join(clamped))


def reason_for_float32(node: fx.Node) -> str | None:
    """Returns the reason why a node must compute in float32; None if it need not.

    The reason is a number that overflows or flushes to zero in the dtype of the inputs. If the
    program itself lowered the inputs, the number is only recorded, as in eager autocast.
    """
    name, low = name_of(node), _low_dtype(node)
    if low is None or name not in _ARITHMETIC + _LIMITS:
        return None
    problems = _problems(node, low, flushes_only=name in _LIMITS)
    if not problems:
        return None
    if any(map(_is_narrower, node.all_input_nodes)):
        return f"{problems}: computed in float32"
    record_range(node, f"{problems}, as in eager autocast")
    return None


def record_range(node: fx.Node, note: str) -> None:
    """Records a note on the numbers of a node."""
    RANGE_NOTE.put(node, f"{name_of(node)}: {note}")


def _problems(node: fx.Node, low: torch.dtype, *, flushes_only: bool) -> str:
    """Describes finite numbers among a node's arguments that the low dtype cannot represent."""
    numbers: list[float] = []

    def collect(arg: Any) -> Any:
        number = _number(arg)
        if number is not None and number != 0 and math.isfinite(number):
            numbers.append(number)
        return arg

    map_aggregate((node.args, node.kwargs), collect)
    info = torch.finfo(low)
    smallest = info.smallest_normal * info.eps
    # Numbers round to the nearest, and half of the smallest number to its even neighbor: zero.
    too_small = [n for n in numbers if abs(n) <= smallest / 2]
    too_large = [n for n in numbers if abs(n) > info.max and not flushes_only]
    flushed = [f"{n:g} flushes to zero in {dtype_name(low)}" for n in too_small]
    return "; ".join([*flushed, *(f"{n:g} overflows {dtype_name(low)}" for n in too_large)])


def _number(arg: Any) -> int | float | None:
    """Returns an argument that is a number or a constant tensor of one number; else None."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return arg
    if not isinstance(arg, fx.Node) or arg.op != "call_function" or name_of(arg) not in _CREATIONS:
        return None
    value = VALUE.get(arg)
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return None
    position = _CREATIONS[name_of(arg)]
    number = arg.args[position] if len(arg.args) > position else arg.kwargs.get("fill_value")
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return number if is_number else None  # type: ignore[return-value]


def _low_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the low dtype of all of a node's inputs; None if they have another dtype."""
    tensors = [t for n in node.all_input_nodes for t in tensors_in(VALUE.get(n))]
    # Type promotion ignores tensors without dimensions.
    dtypes = {t.dtype for t in tensors if t.is_floating_point() and t.dim()}
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _is_narrower(source: fx.Node) -> bool:
    cast = inserted_cast(source)
    if cast is not None:
        return is_widening(cast.dtype, cast.source_dtype)
    return dtypes_differ(CAPTURED.get(source), VALUE.get(source))


def name_of(node: fx.Node) -> str:
    """Returns the name of a node's target: ``masked_fill`` for the method, function and op."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.partition("::")[2]
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", ""))

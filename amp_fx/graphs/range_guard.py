"""Numbers in a program that the low dtype cannot hold: found when a graph is rewritten.

``scores.masked_fill(mask, -1e9)``, ``torch.finfo(torch.float32).min`` and ``x / (y + 1e-8)``
are right in float32. Where this rewrite makes a tensor lower than the program had it (the bare
way in, or a policy that says so), such a number is

- clamped to the range, where it is put in place of elements (``masked_fill``, ``where``): the
  program would have asked for the low dtype's own minimum;
- else the reason to keep the op in float32: it would overflow, or flush to zero.

Where the program itself has the tensor low, under an ambient region, eager autocast's numbers
stand, infinities included; only what eager refuses to run (``masked_fill`` with a value that
overflows) is clamped there too. Whatever is found is in ``metadata.RANGE_NOTE``.

Left alone on purpose: in-place arithmetic, which cannot change its dtype; masks with more than
one element; parameters and buffers, whose values are not known here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.casts import inserted_cast, is_widening
from amp_fx.graphs.metadata import RANGE_NOTE
from amp_fx.graphs.values import captured_value, dtypes_differ, tensors_in, value_of
from amp_fx.torch_private.ops import OpOverload

_REFUSED = ("masked_fill", "index_fill", "fill", "full_like", "new_full", "clamp", "clip")
"""Eager kernels raise where such a number overflows."""
_FILLS = (*_REFUSED, "where", "clamp_min", "clamp_max")
_LIMITS = ("clamp", "clip", "clamp_min", "clamp_max")
"""A limit that flushes to zero is lost, though no limit overflows."""
_ARITHMETIC = ("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv")
_CREATIONS = {"full": 1, "scalar_tensor": 0, "tensor": 0}
"""Functions that make a constant tensor, and where the number stands."""


def clamp_fill_value(node: fx.Node) -> None:
    """Keeps numbers that a node puts in place of elements inside the range of a low dtype."""
    name = name_of(node)
    low = _low_dtype(node)
    if low is None or name.removesuffix("_") not in _FILLS:
        return
    if not any(map(_is_narrower, node.all_input_nodes)) and name.removesuffix("_") not in _REFUSED:
        if problems := _problems(node, low, flushes_only=False):
            record_range(node, f"{problems}, as in eager autocast")
        return
    limit = torch.finfo(low).max
    clamped: list[str] = []

    def clamp(arg: Any) -> Any:
        number = _number(arg)
        if number is None or abs(number) <= limit or not math.isfinite(number):
            return arg
        fits = type(number)(math.copysign(limit, number))
        clamped.append(f"{number:g} clamped to {fits:g}, the limit of {dtype_name(low)}")
        return fits

    node.args = map_aggregate(node.args, clamp)
    node.kwargs = map_aggregate(node.kwargs, clamp)
    if clamped:
        record_range(node, "; ".join(clamped))


def reason_for_float32(node: fx.Node) -> str | None:
    """Why a node must compute in float32: a number that its low inputs' dtype cannot hold.

    Returns:
        None if it need not; what eager autocast would not do either is only recorded.
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


def record_range(node: fx.Node, what: str) -> None:
    """Writes onto a node what was found, and what was done about it."""
    RANGE_NOTE.put(node, f"{name_of(node)}: {what}")


def _problems(node: fx.Node, low: torch.dtype, *, flushes_only: bool) -> str:
    """Lists finite numbers among a node's arguments that the low dtype cannot hold; "" for none."""
    numbers: list[float] = []

    def collect(arg: Any) -> Any:
        number = _number(arg)
        if number is not None and number != 0 and math.isfinite(number):
            numbers.append(number)
        return arg

    map_aggregate((node.args, node.kwargs), collect)
    info = torch.finfo(low)
    smallest = info.smallest_normal * info.eps
    too_small = [n for n in numbers if abs(n) <= smallest / 2]
    too_large = [n for n in numbers if abs(n) > info.max and not flushes_only]
    flushed = [f"{n:g} flushes to zero in {dtype_name(low)}" for n in too_small]
    return "; ".join([*flushed, *(f"{n:g} overflows {dtype_name(low)}" for n in too_large)])


def _number(arg: Any) -> int | float | None:
    """A number among the arguments of a node, or in a tensor that the graph makes of one."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return arg
    if not isinstance(arg, fx.Node) or arg.op != "call_function" or name_of(arg) not in _CREATIONS:
        return None
    value = value_of(arg)
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return None
    position = _CREATIONS[name_of(arg)]
    number = arg.args[position] if len(arg.args) > position else arg.kwargs.get("fill_value")
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return number if is_number else None  # type: ignore[return-value]


def _low_dtype(node: fx.Node) -> torch.dtype | None:
    """The low dtype in which a node computes; None if it has a wider input, or no low one."""
    tensors = [t for n in node.all_input_nodes for t in tensors_in(value_of(n))]
    # A tensor without dimensions does not widen the others.
    dtypes = {t.dtype for t in tensors if t.is_floating_point() and t.dim()}
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _is_narrower(source: fx.Node) -> bool:
    cast = inserted_cast(source)
    if cast is not None:
        return is_widening(cast.dtype, cast.source_dtype)
    return dtypes_differ(captured_value(source), value_of(source))


def name_of(node: fx.Node) -> str:
    """Names what a node calls: ``masked_fill`` for the method, the function and the op."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.partition("::")[2]
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", ""))

"""Computes low-precision products in float32 on CPUs without instructions for the dtype.

Before:
    %y = aten.mm(%x, %weight)                       # all bfloat16
After:
    %wide   = prims.convert_element_type(%weight, torch.float32)    # and likewise %x
    %exact  = aten.mm(%wide_x, %wide)
    %result = amp_fx.rounded(%exact, torch.bfloat16)
    %y      = prims.convert_element_type(%result, torch.bfloat16)

oneDNN's reference kernels are six times slower for bfloat16 than for float32 on AVX2, and four to
sixty times slower for float16 on almost all CPUs. A widened product reads the same rounded inputs
and rounds its result once. The low-precision kernels accumulate in float32 as well, so the results
are rounded at the same points. ``amp_fx.devices.wide_products`` selects the products.

Left unchanged: products for whose dtype the CPU has units, and other devices.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.devices.wide_products import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCHED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    PRODUCT,
    is_wide,
)
from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import CONVERT, is_whole_view, record_value
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from amp_fx.graphs.conditions import Condition

aten = torch.ops.aten

KINDS: Mapping[Any, str] = {
    aten.mm.default: PRODUCT,
    aten.addmm.default: PRODUCT,
    aten.addbmm.default: BATCHED,
    aten.bmm.default: BATCHED,
    aten.baddbmm.default: BATCHED,
    aten.convolution.default: CONVOLUTION,
    aten.convolution_backward.default: CONVOLUTION_BACKWARD,
    aten._scaled_dot_product_flash_attention_for_cpu.default: ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ATTENTION_BACKWARD,
}
"""The ops that are widened, with the kind of their kernel."""

_USUAL_SIZE = 64
"""Assumed value of a symbolic size without a hint."""


@dataclasses.dataclass(frozen=True)
class WidenProducts:
    """Computes low-precision products in float32 and rounds their results.

    If a generated kernel rounds a value and reads it again in float32, inductor skips the rounding,
    whereas a low-precision product reads rounded values from memory. ``amp_fx::rounded`` is a
    rounding that inductor does not remove.
    """

    name: ClassVar[str] = "widen_products"
    ops: ClassVar[frozenset[str]] = frozenset(op._schema.name for op in KINDS)
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``wide_products``."""
        products = [node for graph in graphs_in(gm) for node in graph.nodes if _is_widened(node)]
        wide: dict[fx.Node, fx.Node] = {}
        for node in products:
            for source in node.all_input_nodes:
                if _is_low_value(source.meta["val"]):
                    _widen(source, wide)
            node.args = torch.fx.node.map_arg(node.args, lambda n: wide.get(n, n))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: wide.get(n, n))
            _round_results(node, wide)
        return PassResult(Counter(wide_products=len(products)))


def _is_widened(node: fx.Node) -> bool:
    kind = KINDS.get(node.target)
    if kind is None:
        return False
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, torch.fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    low = {value.dtype for value in tensors if is_low(value.dtype)}
    is_on_cpu = all(value.device.type == "cpu" for value in tensors)
    return is_on_cpu and len(low) == 1 and is_wide(kind, low.pop(), least_size(kind, tensors))


def least_size(kind: str, tensors: list[torch.Tensor]) -> int:
    """Returns the smallest size that determines a kernel's speed.

    These are the numbers of rows, columns and terms of a product, and of queries and keys of an
    attention. For other kinds, returns a typical size.
    """
    if kind in (PRODUCT, BATCHED):
        left, right = tensors[-2:]
        return min(_known(size) for size in (*left.shape[-2:], *right.shape[-2:]))
    if kind in (ATTENTION, ATTENTION_BACKWARD):
        return min(_known(tensor.shape[-2]) for tensor in tensors if tensor.dim() == 4)
    return _USUAL_SIZE


def _known(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return _USUAL_SIZE if hint is None else int(hint)


def _is_low_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_low(value.dtype)


def _widen(source: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns a float32 node with the values of a low node.

    The float32 form of a view is the same view of its base's float32 form, so that all views of a
    value share one conversion.
    """
    if source not in wide:
        if is_whole_view(source):
            wide[source] = _same_view(source, _widen(source.all_input_nodes[0], wide))
        else:
            wide[source] = _converted(source)
    return wide[source]


def _same_view(view: fx.Node, base: fx.Node) -> fx.Node:
    viewed = view.all_input_nodes[0]
    with view.graph.inserting_after(view):
        same = view.graph.node_copy(view, lambda node: base if node is viewed else node)
    record_value(same)
    return same


def _converted(source: fx.Node) -> fx.Node:
    """Converts a low node to float32; conversions of placeholders follow the last placeholder."""
    graph, last = source.graph, source
    while source.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    value = source.meta["val"]
    with graph.inserting_after(last):
        cast = graph.call_function(CONVERT, (source, torch.float32))
    cast.meta = {"val": value.float()}
    if source.op != "call_function":  # an input is in memory and was rounded already
        return cast
    with graph.inserting_after(cast):
        exact = graph.call_function(torch.ops.amp_fx.rounded.default, (cast, value.dtype))
    exact.meta = {"val": value.float()}
    return exact


def _round_results(node: fx.Node, wide: dict[fx.Node, fx.Node]) -> None:
    """Rounds the float32 results of a widened node that were low."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        _round(node, wide)
        return
    node.meta["val"] = tuple(v.float() if _is_low_value(v) else v for v in value)
    for user in list(node.users):
        if user.target is operator.getitem and _is_low_value(user.meta["val"]):
            _round(user, wide)


def _round(node: fx.Node, wide: dict[fx.Node, fx.Node]) -> None:
    graph, users, value = node.graph, list(node.users), node.meta["val"]
    node.meta["val"] = value.float()
    with graph.inserting_after(node):
        exact = graph.call_function(torch.ops.amp_fx.rounded.default, (node, value.dtype))
    with graph.inserting_after(exact):
        cast = graph.call_function(CONVERT, (exact, value.dtype))
    exact.meta, cast.meta = {"val": value.float()}, {"val": value}
    for user in users:
        user.replace_input_with(node, cast)
    wide[cast] = exact

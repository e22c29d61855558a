"""Computes low products in float32 where a CPU has no units for the dtype.

oneDNN's reference kernels take six times as long for bfloat16 as for float32 on AVX2, and four to
sixty times for float16 almost everywhere. A wide product takes the same rounded inputs, is summed
in float32, as the low kernels do too, and its result is rounded once: the rounding points are
autocast's. ``amp_fx.devices.wide_products`` says which products are wide.

The graphs are AOTAutograd's, forward and backward, of core ops. Inductor takes what was rounded in
a kernel for what it was before, where that kernel reads it again in float32; what a low product
reads from memory or writes there is rounded. ``rounded`` is a rounding that nothing takes back.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

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
from amp_fx.graphs.casts import CONVERT, evaluate, is_whole_view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

aten = torch.ops.aten

KINDS: Mapping[Any, str] = {
    aten.mm.default: PRODUCT,
    aten.addmm.default: PRODUCT,
    aten.bmm.default: BATCHED,
    aten.baddbmm.default: BATCHED,
    aten.convolution.default: CONVOLUTION,
    aten.convolution_backward.default: CONVOLUTION_BACKWARD,
    aten._scaled_dot_product_flash_attention_for_cpu.default: ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ATTENTION_BACKWARD,
}
"""The ops that are widened, by the kind of kernel that they take."""

_USUAL_SIZE = 64
"""What is taken for a size that nobody knows."""


def widen_products(graph: fx.Graph) -> int:
    """Rewrites a graph in place.

    Args:
        graph: Of AOTAutograd; its nodes have their values in ``meta["val"]``.

    Returns:
        How many were widened.
    """
    found = [node for node in graph.nodes if _is_widened(node)]
    wide: dict[fx.Node, fx.Node] = {}
    for node in found:
        for source in node.all_input_nodes:
            if _is_low_value(source.meta["val"]):
                _widen(source, wide)
        node.args = torch.fx.node.map_arg(node.args, lambda n: wide.get(n, n))
        node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: wide.get(n, n))
        _round_results(node, wide)
    if found:
        graph.lint()
    return len(found)


def _is_widened(node: fx.Node) -> bool:
    kind = KINDS.get(node.target)
    if kind is None:
        return False
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, torch.fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    low = {value.dtype for value in tensors if is_low(value.dtype)}
    is_here = all(value.device.type == "cpu" for value in tensors)
    return is_here and len(low) == 1 and is_wide(kind, low.pop(), least_size(kind, tensors))


def least_size(kind: str, tensors: list[torch.Tensor]) -> int:
    """The least of the sizes that a kernel's speed goes by; what is not known is guessed.

    Of a product the rows, columns and terms; of attention the queries and keys.
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
    """Finds, or makes, the float32 node that has a low node's numbers.

    Of a view it is the same view of what it is taken of, so that views of one value share its
    float32 form.
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
    evaluate(same)
    return same


def _converted(source: fx.Node) -> fx.Node:
    """A low value in float32, rounded; behind all inputs if it is one."""
    graph, last = source.graph, source
    while source.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    value = source.meta["val"]
    with graph.inserting_after(last):
        cast = graph.call_function(CONVERT, (source, torch.float32))
    cast.meta = {"val": value.float()}
    if source.op != "call_function":  # it comes from memory: no kernel takes its rounding back
        return cast
    with graph.inserting_after(cast):
        exact = graph.call_function(torch.ops.amp_fx.rounded.default, (cast, value.dtype))
    exact.meta = {"val": value.float()}
    return exact


def _round_results(node: fx.Node, wide: dict[fx.Node, fx.Node]) -> None:
    """Rounds what a node gives, now in float32, where it gave low tensors."""
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

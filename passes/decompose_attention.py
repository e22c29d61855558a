"""Decomposes attention of one query, as in the decoding of a token, into generated code.

Before:
    %attended = aten._scaled_dot_product_flash_attention_for_cpu(%query, %key, %value)
    %y        = operator.getitem(%attended, 0)
After, with casts of the inputs to float32, and with limits for scores that are all -inf:
    %products = aten.mul(%query, %key)
    %sums     = aten.sum(%products, [-1])
    %scaled   = aten.mul(%sums, 0.125)
    %scores   = aten.unsqueeze(%scaled, -2)
    %largest  = aten.amax(%scores, [-1], True)
    %less     = aten.sub(%scores, %largest)
    %weights  = aten.exp(%less)
    %total    = aten.sum(%weights, [-1], True)
    %columns  = aten.unsqueeze(%weights, -1)
    %values   = aten.unsqueeze(%value, -3)
    %weighted = aten.mul(%columns, %values)
    %mixed    = aten.sum(%weighted, [-2])
    %quotient = aten.div(%mixed, %total)
    %y        = prims.convert_element_type(%quotient, torch.bfloat16)

Such attention takes the time that reading keys and values takes. ATen's kernel multiplies one row
by a matrix for each head, at a fraction of that speed, and rounds the weights of the values to the
low dtype. Generated code computes them in float32, and does not copy keys that several heads share
(``docs/benchmarks.md``).

Left alone: several queries and small heads, for which ATen's kernel is faster; float32, whose
numbers would change; causal attention, in which one query sees the first key only; dropout; graphs
with gradients, which read the logarithms of the sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import CONVERT, add_call
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from amp_fx.graphs.conditions import Condition

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
MIN_DEPTH = 8
"""Heads of fewer elements do not fill a vector, and take longer in generated code."""


@dataclasses.dataclass(frozen=True)
class DecomposeAttention:
    """Replaces attention of one query by pointwise ops and reductions."""

    name: ClassVar[str] = "decompose_attention"
    ops: ClassVar[frozenset[str]] = frozenset({ATTENTION._schema.name})
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``decomposed_attention``."""
        counts: Counter[str] = Counter()
        for graph in graphs_in(gm):
            attentions = graph.find_nodes(op="call_function", target=ATTENTION)
            for node in [node for node in attentions if _is_decomposed(node)]:
                _decompose(graph, node)
                counts["decomposed_attention"] += 1
        return PassResult(counts)


def _is_decomposed(node: fx.Node) -> bool:
    """Returns True for attention of one low-precision query per head that returns no sums."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    query, key = map(VALUE.of, cast("Sequence[fx.Node]", node.args[:2]))
    has_dropout_or_is_causal = any(node.args[3:])
    if has_dropout_or_is_causal or not is_low(query.dtype):
        return False
    is_known = all(isinstance(size, int) for size in (query.size(1), query.size(3), key.size(1)))
    if not is_known or query.size(3) < MIN_DEPTH:
        return False
    is_one = statically_known_true(query.size(2) == 1)
    has_keys = statically_known_true(key.size(2) > 0)
    is_summed = any(user.args[1] != 0 and user.users for user in node.users)
    return is_one and has_keys and not is_summed


def _decompose(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces one kernel.

    Queries have the shape ``[batch, heads, 1, depth]``, keys and values ``[batch, heads / group,
    keys, depth]``: a group of heads shares one head of keys.
    """
    from amp_fx.torch_private.inductor import store_result

    attended: torch.Tensor = VALUE.of(node)[0]
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    call = functools.partial(add_call, graph)

    def for_each_head(shared: fx.Node) -> fx.Node:
        batch, num_shared, _, depth = VALUE.of(shared).shape
        group = attended.size(1) // num_shared
        if group == 1:
            return shared
        size = batch if isinstance(batch, int) else call(aten.sym_size.int, shared, 0)
        repeated = call(aten.unsqueeze.default, shared, 2)
        repeated = call(aten.expand.default, repeated, [-1, -1, group, -1, -1])
        return call(aten.reshape.default, repeated, [size, attended.size(1), -1, depth])

    if scale is None:
        scale = 1 / math.sqrt(attended.size(-1))
    operands = cast("Sequence[fx.Node]", node.args[:3])
    is_shared = VALUE.of(operands[1]).size(1) != attended.size(1)
    for operand in operands if is_shared else operands[:1]:
        # Inductor would compute the query again for each key, and shared keys for each head.
        store_result(operand)
    with graph.inserting_before(node):
        query, *shared = (call(CONVERT, operand, torch.float32) for operand in operands)
        key, value = map(for_each_head, shared)
        sums = call(aten.sum.dim_IntList, call(aten.mul.Tensor, query, key), [-1])
        scaled = call(aten.mul.Tensor, sums, scale)
        scores = call(aten.unsqueeze.default, scaled, -2)
        if mask is not None:
            scores = call(aten.add.Tensor, scores, call(CONVERT, mask, torch.float32))
        largest = call(aten.amax.default, scores, [-1], True)
        largest = call(aten.clamp_min.default, largest, torch.finfo(torch.float32).min)
        weights = call(aten.exp.default, call(aten.sub.Tensor, scores, largest))
        total = call(aten.sum.dim_IntList, weights, [-1], True)
        # If all scores are -inf, as those of masked keys, the result is zero as in ATen's kernel.
        total = call(aten.clamp_min.default, total, torch.finfo(torch.float32).tiny)
        columns = call(aten.unsqueeze.default, weights, -1)
        weighted = call(aten.mul.Tensor, columns, call(aten.unsqueeze.default, value, -3))
        mixed = call(aten.sum.dim_IntList, weighted, [-2])
        quotient = call(aten.div.Tensor, mixed, total)
    for user in list(node.users):
        if user.args[1] == 0:
            user.target, user.args = CONVERT, (quotient, attended.dtype)
        else:
            graph.erase_node(user)
    graph.erase_node(node)

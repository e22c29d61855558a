"""Decomposes products with float32 results, for programs that run without amp_fx.

Before:
    %y = amp_fx.float32_product(%x, %w, torch.bfloat16)
After:
    %x_bfloat16         = aten._to_copy(%x, dtype=torch.bfloat16)
    %x_bfloat16_float32 = aten._to_copy(%x_bfloat16, dtype=torch.float32)
    %w_bfloat16         = aten._to_copy(%w, dtype=torch.bfloat16)
    %w_bfloat16_float32 = aten._to_copy(%w_bfloat16, dtype=torch.float32)
    %y                  = aten.mm(%x_bfloat16_float32, %w_bfloat16_float32)

Left unchanged: all other ops. Inductor would remove such pairs of casts; runtimes of ONNX do not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import amp_fx.policies.float32_products  # noqa: F401 - registers the op
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import add_cast
from amp_fx.graphs.metadata import CUSTOM, VALUE, provenance
from amp_fx.graphs.values import detect_fake_mode, remember_captured, update_value
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

REASON = "rounded factor of a product with a float32 result"


@dataclasses.dataclass(frozen=True)
class DecomposeFloat32Products:
    """Replaces ``amp_fx::float32_product`` in functional graphs."""

    name: ClassVar[str] = "decompose_float32_products"

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``decomposed_products``, also in bodies of ``cond``."""
        counts: Counter[str] = Counter()
        product = torch.ops.amp_fx.float32_product.default
        for graph in graphs_in(gm):
            remember_captured(graph)
            for node in graph.find_nodes(op="call_function", target=product):
                _decompose(node)
                counts["decomposed_products"] += 1
        return PassResult(counts)


def _decompose(node: fx.Node) -> None:
    a, b, low_dtype = node.args
    with node.graph.inserting_before(node):
        factors = tuple(_rounded(node, factor, low_dtype) for factor in (a, b))
        is_batched = VALUE.of(factors[0]).dim() == 3
        op = torch.ops.aten.bmm.default if is_batched else torch.ops.aten.mm.default
        result = node.graph.call_function(op, factors)
    result.meta.update(provenance(node))
    if CUSTOM.is_on(node):
        CUSTOM.put(result, CUSTOM.of(node))
    update_value(result, detect_fake_mode(node.graph), is_grad_enabled=False)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _rounded(node: fx.Node, factor: Any, low_dtype: Any) -> fx.Node:
    """Returns a factor of a product in float32, rounded to a low dtype."""
    for dtype in (low_dtype, torch.float32):
        if VALUE.of(factor).dtype != dtype:
            factor = add_cast(node.graph, factor, dtype, REASON)
            factor.meta.update(provenance(node))
            update_value(factor, detect_fake_mode(node.graph), is_grad_enabled=False)
    result: fx.Node = factor
    return result

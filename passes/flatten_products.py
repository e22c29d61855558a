"""Flattens batched products of rows with one shared matrix into a single product.

Before:
    %rows    = aten.expand(%x, [64, 4, 192])
    %weights = aten.expand(%weight, [64, 192, 576])
    %y       = aten.bmm(%rows, %weights)
After:
    %flat    = aten.reshape(%rows, [256, 192])
    %matrix  = aten.select(%weights, 0, 0)
    %product = aten.mm(%flat, %matrix)
    %y       = aten.reshape(%product, [64, 4, 576])

Left unchanged: other devices, whose kernels read an expanded matrix without a copy; float32, whose
kernels sum in another order; products with two symbolic sizes. The kernels of float16 do too, and
on AMX units those of bfloat16 for rows whose elements are not next to each other in memory. Those
are flattened only in generated code that may have other bits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import add_call
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class FlattenProducts:
    """Replaces batched products with one shared matrix by flat products.

    Without gradients, ``torch.nn.functional.linear`` computes such a product for an input that is
    not contiguous (``should_fold`` in ``ATen/native/LinearAlgebra.cpp``), for example in
    ``torch.nn.MultiheadAttention`` with ``batch_first=True``. On the CPU, inductor copies the
    expanded matrix once per batch element in every call, and does not pack the weight. Where
    oneDNN has kernels for bfloat16, the flattened product of rows whose elements are next to each
    other has the same bits (``tests/passes/test_flatten_products.py``).

    Attributes:
        dtypes: Dtypes of the products that are flattened.
        keeps_bits: Whether products are left that may have other bits if they are flattened.
    """

    name: ClassVar[str] = "flatten_products"
    ops: ClassVar[frozenset[str]] = frozenset({"aten::bmm"})
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    dtypes: tuple[torch.dtype, ...]
    keeps_bits: bool = False

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``flattened_products``."""
        counts: Counter[str] = Counter()
        for graph in graphs_in(gm):
            products = graph.find_nodes(op="call_function", target=aten.bmm.default)
            flattened = [product for product in products if self._flatten(graph, product)]
            if flattened:
                graph.eliminate_dead_code()
            counts["flattened_products"] += len(flattened)
        return PassResult(counts)

    def _flatten(self, graph: fx.Graph, product: fx.Node) -> bool:
        """Flattens one product if possible; returns True if it was flattened."""
        left, right = product.all_input_nodes[0], product.all_input_nodes[-1]
        value = VALUE.of(product)
        sizes = _sizes(value)
        if sizes is None or value.dtype not in self.dtypes or not _is_shared(VALUE.of(right)):
            return False
        if self.keeps_bits and VALUE.of(left).stride(2) != 1:
            return False
        with graph.inserting_before(product):
            flat = add_call(graph, aten.reshape.default, left, [-1, VALUE.of(left).size(2)])
            matrix = add_call(graph, aten.select.int, right, 0, 0)
            rows = add_call(graph, aten.mm.default, flat, matrix)
            replaced = add_call(graph, aten.reshape.default, rows, sizes)
        replaced.meta = {**product.meta, **replaced.meta}
        product.replace_all_uses_with(replaced)
        return True


def _is_shared(matrices: torch.Tensor) -> bool:
    """Returns True if all matrices of a batch are one expanded matrix on the CPU."""
    if matrices.device.type != "cpu":
        return False
    has_sizes = not any(isinstance(size, torch.SymInt) for size in matrices.shape[1:])
    return has_sizes and matrices.stride(0) == 0 and matrices.size(0) not in (0, 1)


def _sizes(product: torch.Tensor) -> list[int] | None:
    """Returns the shape with -1 for a symbolic size, or None if several sizes are symbolic."""
    sizes = [-1 if isinstance(size, torch.SymInt) else size for size in product.shape]
    return sizes if sizes.count(-1) <= 1 else None

"""Computes products of few rows by inductor's C++ template, from weights in its blocks.

Before:
    %y = aten.addmm(%bias, %x, %weight)       # %x has few rows, %weight is a constant
After:
    %rows    = aten.permute(%weight, [1, 0])              # without padding, not these three
    %padded  = aten.constant_pad_nd(%rows, [0, 0, 0, 47])
    %columns = aten.permute(%padded, [1, 0])
    %blocks  = aten.reshape(%columns, [768, 1, 1048, 48])
    %moved   = aten.permute(%blocks, [2, 0, 3, 1])
    %flat    = aten.reshape(%moved, [1048, 768, 48])
    %blocked = aten.clone(%flat, memory_format=torch.contiguous_format)
    %y       = amp_fx.few_rows_product(%x, %blocked, %bias, 50257, 1)

A product of few rows takes the time that reading its weight from memory takes. oneDNN's kernels
read a packed weight at half of the bandwidth that the template reaches. On a processor without
units for the dtype they compute in float32, and read twice the bytes; the template converts the
blocks in registers. On a processor with AMX, the template multiplies with these units, which take
as long for 32 rows as for one. They read two rows of a block at once, so the rows are interleaved
in pairs. A small weight takes less time than the 30 us in which oneDNN starts a kernel. Constant
folding computes the blocks, once per update of the weight.

With ``max_autotune`` inductor would find the template by timing it in every process, and compute
the blocks while it generates code, which its cache on disk cannot hold. Here there is nothing to
time: the rule is ``takes_template`` in ``amp_fx.weights.cpu.few_rows``.

Left alone on purpose: many rows or few columns, for which oneDNN's kernels are faster; weights that
are too small to be worth compiling a kernel; sizes that are symbolic; other devices, and processors
on which the template has other kernels.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BlockFewRows:
    """Rewrites products of few rows and a constant, where the template is faster."""

    name: ClassVar[str] = "block_few_rows"
    ops: ClassVar[frozenset[str]] = frozenset({"aten::mm", "aten::addmm"})

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``blocked_products``."""
        products = [
            product
            for op in (aten.mm.default, aten.addmm.default)
            for product in gm.graph.find_nodes(op="call_function", target=op)
        ]
        return PassResult(Counter(blocked_products=sum(_block(gm.graph, p) for p in products)))


def _block(graph: fx.Graph, product: fx.Node) -> bool:
    """Rewrites one product if the template is faster; returns True if it did."""
    from amp_fx.torch_private.inductor import lower_few_rows_product
    from amp_fx.weights.cpu.few_rows import takes_template

    *bias, x, weight = cast("Sequence[fx.Node]", product.args)
    if product.kwargs or weight.op != "get_attr":
        return False
    columns = VALUE.of(product).size(1)
    depth = VALUE.of(weight).size(0)
    kernel = takes_template(VALUE.of(product), depth)
    if kernel is None or any(VALUE.of(b).shape != (columns,) for b in bias):
        return False
    lower_few_rows_product(torch.ops.amp_fx.few_rows_product.default)
    padding = -columns % kernel.block
    with graph.inserting_before(product):
        if padding:  # of the rows of the weight as linear layers have it, which lie one by one
            rows = graph.call_function(aten.permute.default, (weight, [1, 0]))
            padded = graph.call_function(aten.constant_pad_nd.default, (rows, [0, 0, 0, padding]))
            weight = graph.call_function(aten.permute.default, (padded, [1, 0]))
        num_blocks = (columns + padding) // kernel.block
        together = 2 if kernel.uses_amx else 1
        sizes = [depth // together, together, num_blocks, kernel.block]
        blocks = graph.call_function(aten.reshape.default, (weight, sizes))
        moved = graph.call_function(aten.permute.default, (blocks, [2, 0, 3, 1]))
        shape = [num_blocks, depth, kernel.block]
        moved = graph.call_function(aten.reshape.default, (moved, shape))
        blocked = graph.call_function(
            aten.clone.default, (moved,), {"memory_format": torch.contiguous_format}
        )
        replaced = graph.call_function(
            torch.ops.amp_fx.few_rows_product.default,
            (x, blocked, bias[0] if bias else None, columns, together),
        )
    replaced.meta = dict(product.meta)
    product.replace_all_uses_with(replaced)
    graph.erase_node(product)
    return True

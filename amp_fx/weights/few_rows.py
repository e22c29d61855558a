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
time: the rule is that of ``takes_template``.

Left alone on purpose: many rows or few columns, for which oneDNN's kernels are faster; weights that
are too small to be worth compiling a kernel; sizes that are symbolic; other devices, and processors
on which the template has other kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, cast

import torch

from amp_fx.devices.wide_products import PRODUCT, is_wide
from amp_fx.dtypes import is_low
from amp_fx.graphs.metadata import VALUE
from amp_fx.torch_private.inductor import few_rows_kernel, lower_few_rows_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from amp_fx.torch_private.inductor import FewRowsKernel

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Up to where the template is faster than oneDNN; see ``docs/benchmarks.md``.

    Attributes:
        rows: Rows for a weight of any size.
        multiplications: Rows times elements of the weight, for more rows. oneDNN takes 30 us to
            start a kernel.
    """

    rows: int
    multiplications: int


WITHOUT_UNITS = RowLimits(8, 2**19)
WITH_UNITS = RowLimits(4, 2**21)
WITH_AMX = RowLimits(32, 2**24)
MAX_ROWS = 128
"""No weight is so small that the template is faster for many more rows."""
MIN_COLUMNS = 16
"""Blocks of fewer columns are padding for the most part."""
MIN_WEIGHTS = 2**12
"""Elements of a weight from which on a faster call is worth a second of compile time."""

_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "few_rows_product(Tensor x, Tensor blocked, Tensor? bias, int columns, int together) -> Tensor"
)


@torch.library.impl(_library, "few_rows_product", "CompositeExplicitAutograd")
def few_rows_product(
    x: torch.Tensor, blocked: torch.Tensor, bias: torch.Tensor | None, columns: int, together: int
) -> torch.Tensor:
    """Multiplies rows by a blocked weight, as generated code does but for roundings.

    Args:
        x: Rows, ``[rows, depth]``.
        blocked: The weight, ``[blocks, depth, columns of a block]``.
        bias: Is added to each row; ``[columns]``.
        columns: The number of columns without padding.
        together: How many rows of a block are interleaved: 2 for AMX units, else 1.
    """
    num_blocks, depth, block = blocked.shape
    rows = blocked.reshape(num_blocks, depth // together, block, together).permute(1, 3, 0, 2)
    weight = rows.reshape(depth, num_blocks * block)[:, :columns]
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


@functools.cache
def _lower() -> None:
    lower_few_rows_product(torch.ops.amp_fx.few_rows_product.default)


def block_few_rows(graph: fx.Graph) -> int:
    """Rewrites a graph in place.

    Args:
        graph: A graph whose constants are ``get_attr`` nodes.

    Returns:
        The number of products that were rewritten.
    """
    products = [
        product
        for op in (aten.mm.default, aten.addmm.default)
        for product in graph.find_nodes(op="call_function", target=op)
        if _block(graph, product)
    ]
    if products:
        _lower()
        graph.lint()
    return len(products)


def _block(graph: fx.Graph, product: fx.Node) -> bool:
    """Rewrites one product if the template is faster; returns True if it did."""
    *bias, x, weight = cast("Sequence[fx.Node]", product.args)
    if product.kwargs or weight.op != "get_attr":
        return False
    columns = VALUE.of(product).size(1)
    depth = VALUE.of(weight).size(0)
    kernel = takes_template(VALUE.of(product), depth)
    if kernel is None or any(VALUE.of(b).shape != (columns,) for b in bias):
        return False
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


def max_rows(dtype: torch.dtype, num_weights: int, *, uses_amx: bool) -> int:
    """Returns the number of rows up to which the template is faster on this processor.

    Args:
        dtype: The dtype of the factors.
        num_weights: Elements of the weight.
        uses_amx: Whether the template's kernel uses AMX units.
    """
    is_without_units = is_wide(PRODUCT, dtype, 1)
    limits = WITH_AMX if uses_amx else WITHOUT_UNITS if is_without_units else WITH_UNITS
    return max(limits.rows, min(MAX_ROWS, limits.multiplications // num_weights))


def takes_template(product: torch.Tensor, depth: int) -> FewRowsKernel | None:
    """Returns the template's kernel; None if oneDNN is as fast or faster.

    Args:
        product: The result, ``[rows, columns]``.
        depth: How many elements are added up.
    """
    sizes = *product.shape, depth
    is_low_on_cpu = product.device.type == "cpu" and is_low(product.dtype)
    if not is_low_on_cpu or any(not isinstance(size, int) for size in sizes):
        return None
    rows, columns, depth = sizes
    num_weights = columns * depth
    if not 0 < rows <= MAX_ROWS or columns < MIN_COLUMNS or num_weights < MIN_WEIGHTS:
        return None
    kernel = few_rows_kernel(product.dtype, rows, columns, depth)
    if kernel is None or rows > max_rows(product.dtype, num_weights, uses_amx=kernel.uses_amx):
        return None
    return kernel

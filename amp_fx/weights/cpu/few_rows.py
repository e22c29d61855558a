"""Kernels for products of few rows with blocked weights (``passes.block_few_rows``)."""

from __future__ import annotations

import dataclasses

import torch

from amp_fx.devices.wide_products import PRODUCT, is_wide
from amp_fx.dtypes import is_low
from amp_fx.torch_private.inductor import FewRowsKernel, few_rows_kernel


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
WITH_UNITS = RowLimits(4, 2**18)
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

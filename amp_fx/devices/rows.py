"""Measures which of ATen's kernels give a row the same bits in every batch, on this machine.

The kernel of a product may be another one for few rows, or for another number of threads. So it
is measured for the sizes of each weight, and the results are written to a file: every process on
the same kind of machine decides alike.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.csrc.build import cache_folder
from amp_fx.devices.low_dtypes import has_product_kernels, processor_name
from amp_fx.dtypes import dtype_name
from amp_fx.torch_private.modes import no_dispatch_modes
from amp_fx.torch_private.tensors import suggest_memory_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROWS = (*range(1, 10), 16, 17, 33, 64, 100, 256, 512)
"""Numbers of rows that are compared."""

BATCH = 5
"""How many elements of a batch are compared with each alone, for other ops."""

SHOWN = ((64, 256), (768, 3072), (3072, 768))
"""Sizes of products that ``python -m amp_fx env`` shows."""


@functools.cache
def differing_rows(dtype: torch.dtype, depth: int, columns: int) -> tuple[int, ...]:
    """Returns the numbers of rows whose products with a matrix have other bits.

    Rows are compared with the same rows of a larger batch, in every position, with and without a
    bias, for both layouts of the matrix, for packed ones, and for several numbers of threads.

    Args:
        dtype: The dtype of the product.
        depth: The number of elements that are added up.
        columns: The number of columns of the matrix.
    """
    path = _file()
    known = json.loads(path.read_text()) if path.exists() else {}
    key = f"{dtype_name(dtype)} {depth}x{columns}, also packed"
    if key not in known:
        known[key] = _measured(dtype, depth, columns)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(known, indent=1, sort_keys=True))
            new.replace(path)
    return tuple(known[key])


def _file() -> Path:
    name = f"rows {processor_name()} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"
    return cache_folder() / f"{name.replace(' ', '-').replace('/', '-')}.json"


def _measured(dtype: torch.dtype, depth: int, columns: int) -> list[int]:
    with _real_tensors(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS[-1], depth, generator=generator).to(dtype)
        weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype)
        laid_out = weight.t().contiguous()
        ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda rows: torch.mm(rows, weight.t()),
            lambda rows: torch.mm(rows, laid_out),
            lambda rows: torch.addmm(bias, rows, weight.t()),
            lambda rows: torch.addmm(bias, rows, laid_out),
        ]
        plain, biased = ways[0](x), ways[2](x)
        expected = [plain, plain, biased, biased]
        for packed in _packed(weight):
            ways += [functools.partial(_packed_product, packed, b) for b in (None, bias)]
            expected += [plain, biased]

        def is_equal(size: int) -> bool:
            return all(
                torch.equal(way(x[rows].contiguous()), whole[rows])
                for way, whole in zip(ways, expected, strict=True)
                for rows in (slice(size), slice(-size, None))
            )

        return [size for size in ROWS if not _with_threads(is_equal, size)]


def _packed(weight: torch.Tensor) -> list[torch.Tensor]:
    """Packs a matrix for oneDNN as inductor does, for one row, many, and an unknown number."""
    if weight.dtype is not torch.bfloat16 or not has_product_kernels(weight.dtype):
        return []
    return [torch.ops.mkldnn._reorder_linear_weight(weight, n) for n in (1, ROWS[-1], None)]


def _packed_product(
    weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def is_rowwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if an op gives the same bits for each element of a batch and for it alone.

    Args:
        op: An op whose first argument has the batch in dimension 0, and so has its (first) result.
        args: Its arguments, with fake tensors.
        kwargs: More of them.
    """
    with _real_tensors(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            sizes = [size if isinstance(size, int) else size.node.hint or 5 for size in value.shape]
            found = torch.rand(sizes, generator=generator).to(value.dtype)
            return found.contiguous(memory_format=suggest_memory_format(value))

        first = torch.cat([real(args[0])] * BATCH)[:BATCH]
        first = first * torch.rand(first.shape, generator=generator).to(first.dtype)
        others = [real(value) for value in args[1:]]

        def call(x: torch.Tensor) -> torch.Tensor:
            if op is torch.ops.aten.native_group_norm.default:
                others[2] = x.size(0)
            result = op(x, *others, **kwargs)
            return result if isinstance(result, torch.Tensor) else result[0]

        whole = call(first)

        def is_equal(size: int) -> bool:
            return torch.equal(call(first[size : size + 1]), whole[size : size + 1])

        return all(_with_threads(is_equal, size) for size in range(len(first)))


def _with_threads(function: Callable[[int], bool], argument: int) -> bool:
    """Returns True if a function returns True with each of several numbers of threads."""
    before = torch.get_num_threads()
    try:
        for count in {1, 2, os.cpu_count() or 1}:
            torch.set_num_threads(count)
            if not function(argument):
                return False
    finally:
        torch.set_num_threads(before)
    return True


@contextlib.contextmanager
def _real_tensors() -> Iterator[None]:
    """Runs ops on real tensors inside a compiler, and without autocast."""
    with no_dispatch_modes(), torch.autocast("cpu", enabled=False):
        yield

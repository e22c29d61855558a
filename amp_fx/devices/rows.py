"""Tests which kernels of ATen are batch-invariant on this machine.

A product may use different kernels depending on the number of rows and threads. Each size of a
weight is therefore tested, and results are written to a file, so that all processes on machines of
the same kind make the same decisions.
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
"""Numbers of rows to test."""

BATCH = 5
"""Batch size in tests of ops other than products."""

SHOWN = ((64, 256), (768, 3072), (3072, 768))
"""Sizes of products that ``python -m amp_fx env`` lists."""


@functools.cache
def differing_rows(dtype: torch.dtype, depth: int, columns: int) -> tuple[int, ...]:
    """Returns the numbers of rows whose products with a matrix differ from those in a larger batch.

    Compares the first and last rows of a batch with and without a bias, for both layouts of the
    matrix and several numbers of threads.

    Args:
        dtype: The dtype of the product.
        depth: The size of the summed dimension.
        columns: The number of columns of the matrix.
    """
    path = _file()
    results = json.loads(path.read_text()) if path.exists() else {}
    key = f"{dtype_name(dtype)} {depth}x{columns}, also packed"
    if key not in results:
        results[key] = _measured(dtype, depth, columns)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(results, indent=1, sort_keys=True))
            new.replace(path)
    return tuple(results[key])


def _file() -> Path:
    name = f"rows {processor_name()} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"
    return cache_folder() / f"{name.replace(' ', '-').replace('/', '-')}.json"


def _measured(dtype: torch.dtype, depth: int, columns: int) -> list[int]:
    with _real_tensors(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS[-1], depth, generator=generator).to(dtype)
        weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype)
        contiguous = weight.t().contiguous()
        products: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda rows: torch.mm(rows, weight.t()),
            lambda rows: torch.mm(rows, contiguous),
            lambda rows: torch.addmm(bias, rows, weight.t()),
            lambda rows: torch.addmm(bias, rows, contiguous),
        ]
        plain, biased = products[0](x), products[2](x)
        expected = [plain, plain, biased, biased]
        for packed in _packed(weight):
            products += [functools.partial(_packed_product, packed, b) for b in (None, bias)]
            expected += [plain, biased]

        def is_equal(size: int) -> bool:
            return all(
                torch.equal(product(x[rows].contiguous()), whole[rows])
                for product, whole in zip(products, expected, strict=True)
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
    """Returns True if an op returns the same bits for an element alone and in a batch.

    Args:
        op: An op whose first argument and first result have the batch in dimension 0.
        args: Positional arguments of the op, with fake tensors.
        kwargs: Keyword arguments of the op.
    """
    with _real_tensors(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            sizes = [size if isinstance(size, int) else size.node.hint or 5 for size in value.shape]
            tensor = torch.rand(sizes, generator=generator).to(value.dtype)
            return tensor.contiguous(memory_format=suggest_memory_format(value))

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
    """Returns True if a function returns True for several numbers of threads."""
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
    """Context in which ops run on real tensors during compilation, without autocast."""
    with no_dispatch_modes(), torch.autocast("cpu", enabled=False):
        yield

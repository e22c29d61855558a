"""``python -m amp_fx.bench.products FILE``: which products this CPU computes faster in float32.

The file is for ``options={"products": FILE}``. What it decides changes sums within a product, never
where values are rounded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from amp_fx.bench.settings import machine
from amp_fx.devices.product_costs import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCHED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    PRODUCT,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

aten = torch.ops.aten

_ROWS, _POSITIONS = (1, 4, 16, 64), (16, 64, 256, 1024)
MARGIN = 1.5
"""How much faster a wide product has to be."""
_WIDTH = 256
_MAX_ROUNDS, _MAX_SECONDS = 50, 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the table.

    Returns:
        The exit code: 0, or 1 if something did not settle because the machine was too busy.
    """
    parser = argparse.ArgumentParser(prog="python -m amp_fx.bench.products", description=__doc__)
    parser.add_argument("file", type=Path, help="the JSON file to write")
    path = parser.parse_args(argv).file
    ratios = {name: measured(getattr(torch, name)) for name in ("bfloat16", "float16")}
    busy = [f"{d} {k} {s}" for d, kinds in ratios.items() for (k, s), r in kinds.items() if not r]
    if busy:
        sys.stderr.write(f"this machine is too busy: no steady time of {', '.join(busy)}\n")
        return 1
    wide = {name: spans(found) for name, found in ratios.items()}
    times = {d: {f"{k} {s}": r for (k, s), r in kinds.items()} for d, kinds in ratios.items()}
    found = {
        "wide": wide,
        "low / wide": times,
        "machine": machine(torch.device("cpu")),
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")
    return 0


def spans(ratios: Mapping[tuple[str, int], float | None]) -> dict[str, tuple[int, int | None]]:
    """The least sizes between which each kind of product is clearly faster wide; None has no end.

    Between two sizes, what was measured at the smaller one holds. If there are several such
    ranges, it is the one with the largest gain.
    """
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in ratios):
        sizes = [size for known, size in ratios if known == kind]
        is_wide = [(ratios[kind, size] or 0) > MARGIN for size in sizes]
        if not any(is_wide):
            continue
        first = last = max(range(len(sizes)), key=lambda i: ratios[kind, sizes[i]] or 0)
        while first > 0 and is_wide[first - 1]:
            first -= 1
        while last + 1 < len(sizes) and is_wide[last + 1]:
            last += 1
        end = sizes[last + 1] - 1 if last + 1 < len(sizes) else None
        found[kind] = (sizes[first] if first else 0, end)
    return found


def measured(dtype: torch.dtype) -> dict[tuple[str, int], float | None]:
    """How many times as long the low product takes, by kind and least size."""

    def low(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    found: dict[tuple[str, int], float | None] = {}
    with torch.no_grad():
        for size in _ROWS:
            product = low(size, _WIDTH), low(_WIDTH, _WIDTH)
            found[PRODUCT, size] = _ratio(torch.matmul, *product)
            batch = low(4, size, _WIDTH), low(4, _WIDTH, 64)
            found[BATCHED, size] = _ratio(torch.matmul, *batch)
        for size in _POSITIONS:
            heads = low(1, _POSITIONS[-1] // size, size, 64)
            given = _attend(heads, heads, heads)
            found[ATTENTION, size] = _ratio(_attend, heads, heads, heads)
            found[ATTENTION_BACKWARD, size] = _ratio(_attend_back, *[heads] * 4, *given)
        picture, kernel = low(1, 32, 28, 28), low(32, 32, 3, 3)
        found[CONVOLUTION, 32] = _ratio(_convolve, picture, kernel)
        found[CONVOLUTION_BACKWARD, 32] = _ratio(_convolve_back, picture, picture, kernel)
    return found


_HOW = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
"""Stride, padding and so on of the convolution that is measured."""


def _convolve(picture: torch.Tensor, kernel: torch.Tensor) -> Any:
    return aten.convolution(picture, kernel, None, *_HOW)


def _convolve_back(grad: torch.Tensor, picture: torch.Tensor, kernel: torch.Tensor) -> Any:
    wanted = (True, True, False)
    return aten.convolution_backward(grad, picture, kernel, None, *_HOW, wanted)[:2]


def _attend(*query_key_value: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(*query_key_value)


def _attend_back(grad: torch.Tensor, *given: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *given, 0.0, False)


def _ratio(op: Callable[..., Any], *args: torch.Tensor) -> float | None:
    """The time of a low call, by that of a wide one with its casts; None if it does not settle."""
    dtype = args[0].dtype

    def call_wide() -> Any:
        outputs = op(*(arg.float() for arg in args))
        return tree_map_only(torch.Tensor, lambda out: out.to(dtype), outputs)

    low, wide = _least_times(lambda: op(*args), call_wide)
    return None if low is None or wide is None else low / wide


def _least_times(*calls: Callable[[], Any]) -> list[float | None]:
    """The least time of each call, made in turns until each was that fast three times.

    None for one that never was: other work on the machine stops calls for longer than they take.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + _MAX_SECONDS
    for _ in range(_MAX_ROUNDS):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
        if all(map(_is_settled, times)) or time.perf_counter() > end:
            break
    return [min(own) if _is_settled(own) else None for own in times]


def _is_settled(times: list[float]) -> bool:
    fastest = sorted(times)[:3]
    return len(fastest) == 3 and fastest[-1] < 1.15 * fastest[0]


if __name__ == "__main__":
    sys.exit(main())

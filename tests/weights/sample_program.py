"""Checks of the sampling kernel, for a process in which Triton interprets (``TRITON_INTERPRET``).

Args:
    check: One of ``CHECKS``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LOWS = (torch.bfloat16, torch.float16, torch.float32)

Tensors = list[torch.Tensor]


def weights(dtype: torch.dtype = torch.float32) -> Tensors:
    """More than one program's worth, of odd sizes, some with odd numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 2, 3, 7, 31, 33, 129, 1000] * 20
    found = [torch.randn(size, generator=generator) for size in sizes]
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1e38, 1e-44, 65520.0, 3e-8, 1e-40]
    found += [torch.tensor(odd), torch.tensor([float("nan")]), torch.randn(()), *halves()]
    return [weight.to(dtype) for weight in found]


def halves() -> Tensors:
    """Bits that lie between two neighbours of bfloat16 and float16, NaNs with payload too."""
    ties = 0x3F800000 + torch.arange(0, 2**18, 2**11, dtype=torch.int32)
    return [
        ties.view(torch.float32),
        torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32),
    ]


def flagged(sources: Sequence[torch.Tensor], lows: Sequence[torch.Tensor], rounds: int) -> set[int]:
    """Which copies were flagged in so many launches."""
    from amp_fx.weights.sample_kernel import launch

    rows = [[t.data_ptr() for t in sources], [t.data_ptr() for t in lows]]
    table = torch.tensor([*rows, [t.numel() for t in sources]])
    flags = torch.zeros(len(sources), dtype=torch.int32)
    for seed in range(rounds):
        launch(table, flags, seed, sources[0].dtype, lows[0].dtype)
    return set(flags.nonzero().flatten().tolist())


def check_equal() -> None:
    for source_dtype in SOURCES:
        sources = weights(source_dtype)
        for dtype in LOWS:
            found = flagged(sources, [s.to(dtype) for s in sources], 30)
            assert not found, (source_dtype, dtype, found)


def check_differing() -> None:
    """All elements differ: one launch must do. By one bit of the copy, or NaN on one side."""
    for dtype in LOWS[:2]:
        sources = [w for w in weights() if not w.isnan().any() and (w.abs() < 1e4).all()]
        lows = [s.to(dtype) for s in sources]
        for low in lows[::2]:
            low.view(torch.int16).bitwise_xor_(1)
        sources[1].fill_(float("nan"))
        lows[3].fill_(float("nan"))
        found = flagged(sources, lows, 1)
        assert found == {1, 3, *range(0, len(lows), 2)}, (dtype, found)


def check_single() -> None:
    """First, last and some other element: each is found sooner or later, and nothing else."""
    for place in (0, 4, 6):
        sources = weights()
        lows = [s.bfloat16() for s in sources]
        lows[3][place] += 1
        found = flagged(sources, lows, 100)  # to miss it takes 2e-7
        assert found == {3}, (place, found)


CHECKS = {f.__name__: f for f in (check_equal, check_differing, check_single)}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

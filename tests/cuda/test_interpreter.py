"""Repairs of Triton's interpreter: its casts equal torch's."""

from __future__ import annotations

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.cuda import needs

needs.start()

from tests.cuda import kernels  # noqa: E402

SIZE = 64


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def ties() -> torch.Tensor:
    """Numbers halfway between two of bfloat16, and of float16, above even and odd ones."""
    steps = torch.arange(SIZE // 2)
    return torch.cat([1 + (2 * steps + 1) / 2**8, 1 + (2 * steps + 1) / 2**11])


def extremes() -> torch.Tensor:
    """Zeros, infinities, NaN, and what the low dtypes hold as subnormals or not at all."""
    inf, nan = float("inf"), float("nan")
    some = [0.0, -0.0, inf, -inf, nan, 1e-7, -3e-8, 65520.0, 1e38, 3.4e38]
    return torch.tensor((some * SIZE)[:SIZE])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("make", [numbers, ties, extremes])
def test_casts_round_to_the_nearest_even(make: object, dtype: torch.dtype) -> None:
    x = make()  # type: ignore[operator]
    found = torch.empty(SIZE, dtype=dtype, device="cuda")
    kernels.cast[(1,)](x.cuda(), found)
    torch.testing.assert_close(found.cpu(), x.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = torch.empty(SIZE, device="cuda")
    kernels.cast[(1,)](found, back)
    torch.testing.assert_close(back.cpu(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)

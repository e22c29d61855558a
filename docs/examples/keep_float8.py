"""Keeps float8 weights with their scales, and quantizes them again after each update.

    python keep_float8.py --width 256 --updates 3

The model stays in float32, for the optimizer and for checkpoints. Each linear layer multiplies in
float8, with data and scale that ``amp_fx.keep`` computes once per update of its weight.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import amp_fx

FLOAT8 = torch.float8_e4m3fn
num_quantized = 0


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data in float8 and the scale to multiply it with, one for all elements."""
    scale = x.abs().amax().clamp(min=1e-12).float() / torch.finfo(FLOAT8).max
    return (x / scale).to(FLOAT8), scale


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a weight, counted."""
    global num_quantized  # noqa: PLW0603
    num_quantized += 1
    return quantize(weight)


class Float8Linear(nn.Module):
    """A linear layer that multiplies in float8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantized = amp_fx.keep(quantize_weight, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of inputs [..., in], outputs [..., out] in bfloat16."""
        data, scale = self.quantized()
        x8, x_scale = quantize(x.flatten(0, -2))
        y = torch._scaled_mm(x8, data.t(), x_scale, scale, out_dtype=torch.bfloat16)
        return y.view(*x.shape[:-1], -1) + self.bias.bfloat16()


@torch.no_grad()
def main() -> None:
    """Serves a model between updates of its weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
    )
    float8 = nn.Sequential(*(Float8Linear(m) if isinstance(m, nn.Linear) else m for m in model))
    x = torch.randn(16, args.width)
    for update in range(args.updates):
        for weight in model.parameters():
            weight.data.add_(0.01 * torch.randn_like(weight))  # no version tells of this
        for _ in range(args.calls):
            y = float8(x)
        fresh = nn.Sequential(*(Float8Linear(m) if isinstance(m, nn.Linear) else m for m in model))
        assert torch.equal(y, fresh(x)), "a stale weight"
        expected = model(x)
        error = ((y - expected).norm() / expected.norm()).item()
        print(f"update {update}: off float32 by {error:.1%}")
        assert error < 0.1
    kept = [layer.quantized.bytes for layer in float8 if isinstance(layer, Float8Linear)]
    print(f"{sum(kept):,} bytes of float8 weights and scales, {num_quantized} quantizations")
    assert sum(kept) == 8 * args.width**2 + 2 * 4
    assert num_quantized == 2 * args.updates + 2 * args.updates  # half of them are the check's


if __name__ == "__main__":
    main()

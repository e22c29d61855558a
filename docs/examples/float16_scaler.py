"""Trains in float16 with a loss scale: the loop, and what to do about overflows.

python float16_scaler.py --steps 100
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import amp_fx


def main() -> tuple[list[float], int]:
    """Trains; returns the loss of each step, and how many steps were skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, args.width), nn.GELU(), nn.Linear(args.width, 1)).to(device)
    # The loss belongs into the region, or its outputs back to float32: a float16 loss overflows.
    step = amp_fx.compile(model, dtype=torch.float16, output_dtype="original")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = amp_fx.GradScaler(device, named_parameters=model.named_parameters(), min_scale=1.0)
    x = torch.randn(64, 16, device=device)
    y = x.sum(1, keepdim=True).sin()
    losses, num_skipped = [], 0
    for number in range(args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(step(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_and_clip_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        if scaler.last_step.skipped:
            num_skipped += 1
            print(f"step {number}, scale {scaler.get_scale():g}:", *scaler.last_step.overflows)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {scaler.get_scale():g}")
    print(f"{num_skipped} of {args.steps} steps were skipped")
    return losses, num_skipped


if __name__ == "__main__":
    losses, num_skipped = main()
    assert losses[-1] < losses[0], losses
    assert num_skipped < len(losses)

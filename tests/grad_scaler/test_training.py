"""A small language model on real text, in float16: it learns with the scaler and not without."""

from __future__ import annotations

import itertools
import math
from pydoc_data import topics

import pytest
import torch
from torch import Tensor, nn

import amp_fx

CONTEXT, BATCH, NUM_STEPS = 8, 64, 200


def text() -> Tensor:
    return torch.tensor(list("\n".join(topics.topics.values()).encode("ascii", "ignore")))


def train(scaler: amp_fx.GradScaler, loss_weight: float, *, is_float16: bool = True) -> float:
    """Returns the mean loss of the last 30 steps.

    The loss is weighted as where a sum over many micro-batches or tokens is averaged: small
    gradients, which float32 does not mind.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, 24),
        nn.Flatten(1),
        nn.Linear(24 * CONTEXT, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 128),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = text()
    rng = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(NUM_STEPS):
        starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=rng)
        windows = data[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=is_float16):
            logits = model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.float(), windows[:, -1])
        scaler.scale(loss * loss_weight).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@pytest.mark.slow
def test_float16_training_needs_the_scaler() -> None:
    """Trains without the scaler, which stalls or diverges, depending on the size of gradients."""
    guess = math.log(128)  # all characters equally likely
    off = amp_fx.GradScaler("cpu", enabled=False)
    stalled, diverged = train(off, 1e-6), train(off, 1e-4)
    assert stalled == pytest.approx(guess, rel=0.01)
    assert diverged > 1.2 * guess
    in_float32 = train(off, 1e-6, is_float16=False)
    scaled = train(amp_fx.GradScaler("cpu", growth_interval=50), 1e-6)
    assert in_float32 < 0.65 * guess
    assert abs(scaled - in_float32) < 0.02 * in_float32


def test_scale_finds_its_level() -> None:
    """Starts with a far too large scale: each overflow skips a step, until none overflows."""
    scales: list[float] = []

    class Noting(amp_fx.GradScaler):
        def update(self, new_scale: float | Tensor | None = None) -> None:
            super().update(new_scale)
            scales.append(self.get_scale())

    loss = train(Noting("cpu", init_scale=2.0**40), 1.0)
    assert loss < 0.65 * math.log(128)
    assert len(set(scales[-50:])) == 1
    assert all(later <= earlier for earlier, later in itertools.pairwise(scales))
    assert 1.0 < scales[-1] < 2.0**24

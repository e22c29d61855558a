"""Trainers take the scaler as they take torch's; imported late, as each takes seconds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import amp_fx


@pytest.fixture(autouse=True)
def _torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back that Lightning wraps ``torch.compile`` when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


def train(scaler: Any, trainer: Any) -> list[torch.Tensor]:
    """Five steps of which the second overflows; parameters and scale at the end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer(scaler, model, optimizer)
    return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]


def batch(i: int) -> torch.Tensor:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
    return inputs * float("inf") if i == 1 else inputs


def with_fabric(scaler: Any, model: Any, optimizer: Any) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(model, optimizer)
    for i in range(5):
        optimizer.zero_grad()
        fabric.backward(model(batch(i)).square().mean())
        if i != 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()


def with_accelerate(scaler: Any, model: Any, optimizer: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    for i in range(5):
        optimizer.zero_grad()
        accelerator.backward(model(batch(i)).square().mean())
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, False, False, False]


@pytest.mark.parametrize("trainer", [with_fabric, with_accelerate])
def test_trainers_take_the_scaler(trainer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers' own, which differ by version
        ours = train(amp_fx.GradScaler("cpu"), trainer)
        theirs = train(torch.amp.GradScaler("cpu"), trainer)
    assert ours[-1].item() < 2.0**16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

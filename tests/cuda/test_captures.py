"""Calls and steps do nothing that ends a capture of a CUDA graph in another thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda import needs

needs.start()

import amp_fx  # noqa: E402
from tests.cuda.device import capture_elsewhere  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_ends_a_capture_is_an_error() -> None:
    event = torch.accelerator.current_stream("cuda").record_event()
    other: Any = torch.cuda.Event
    with capture_elsewhere():
        for ask in (event.query, other().query, lambda: torch.ones(1).pin_memory()):
            with pytest.raises(RuntimeError, match="stream is capturing"):
                ask()
    assert event.query()


def test_the_scale_is_seen() -> None:
    """The host's bound of it falls with each step, until a copy of the scale has arrived."""
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = amp_fx.GradScaler("cuda", init_scale=512.0, growth_interval=100)

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        scaler.step(optimizer)
        scaler.update()

    scaler.scale(torch.ones((), device="cuda"))
    step()
    with capture_elsewhere():
        for _ in range(20):
            step()
        assert scaler._bound.value >= 128.0

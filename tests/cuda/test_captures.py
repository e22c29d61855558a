"""What calls and steps do not do, as it would end a capture of a CUDA graph in another thread."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from tests.cuda import needs

needs.start()

import amp_fx  # noqa: E402
from amp_fx import weight_cache  # noqa: E402
from amp_fx.weights import sample  # noqa: E402
from amp_fx.weights.sample import CALLS_BETWEEN  # noqa: E402
from tests.cuda.device import capture_elsewhere  # noqa: E402
from tests.weights.alarms import alarms  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_ends_a_capture_is_an_error() -> None:
    event = torch.accelerator.current_stream("cuda").record_event()
    other: Any = torch.cuda.Event
    with capture_elsewhere():
        for ask in (event.query, other().query, lambda: torch.ones(1).pin_memory()):
            with pytest.raises(RuntimeError, match="stream is capturing"):
                ask()
    assert event.query()


def test_samples_are_taken_and_read() -> None:
    weight_cache.clear()
    net = nn.Linear(8, 8, device="cuda")
    options: Any = {"dtype": "bfloat16", "compiler": "aot_eager", "weight_cache": "training"}
    options["fallback"] = False
    compiled = torch.compile(net, backend="amp_fx", options=options)
    x = torch.ones(2, 8, device="cuda")
    alias = from_dlpack(net.weight.detach())
    with torch.no_grad(), alarms() as messages:
        for _ in range(3):
            compiled(x)
        with capture_elsewhere():
            for _ in range(CALLS_BETWEEN):
                compiled(x)
            assert not messages
            alias.fill_(2.0)
            for _ in range(CALLS_BETWEEN + 1):
                compiled(x)
    assert len(messages) == 1


def test_more_elements_pin_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many elements are compared is drawn anew after each write; after one, of one weight."""
    weight_cache.clear()
    chance = Mock(random=lambda: 0.0, randrange=lambda _: 0)
    monkeypatch.setattr(sample, "_random", chance)
    first = nn.Linear(60, 50)
    net = nn.Sequential(first, nn.Linear(50, 10)).cuda()
    options: Any = {"dtype": "bfloat16", "compiler": "aot_eager", "weight_cache": "training"}
    options["fallback"] = False
    compiled = torch.compile(net, backend="amp_fx", options=options)
    x = torch.ones(2, 60, device="cuda")
    with torch.no_grad():
        for _ in range(2 * CALLS_BETWEEN):
            first.weight.mul_(0.5)
            compiled(x)
        chance.random = lambda: 1 - 1e-9
        with capture_elsewhere():
            torch._foreach_mul_(list(net.parameters()), 0.5)
            for _ in range(2 * CALLS_BETWEEN):
                compiled(x)


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

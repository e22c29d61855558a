"""``compile_step`` on the device: as a CUDA graph, and float16 training that never waits."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from tests.gpu.place import DEVICE, MARKS, ON_A_GPU, ON_CUDA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [*MARKS, ON_CUDA]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(DEVICE)


def batches(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        x, y = (torch.randn(16, size, generator=generator) for size in (32, 8))
        yield x.to(DEVICE), y.to(DEVICE)


def train(name: str, *, compiles: bool, mode: str | None = None) -> tuple[list[float], Any]:
    """Losses of float16 training; ``mode`` is that of the compiled step."""
    model = make_model()
    compiled = torch.compile(model, backend="amp_fx", options={"dtype": "fp16"})
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = amp_fx.GradScaler(init_scale=256.0)
    step = scaler.compile_step(optimizer, max_norm=1.0, mode=mode) if compiles else None
    losses = []
    for x, y in batches(12):
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(compiled(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if step is not None:
            step()
        else:
            scaler.unscale_and_clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], scaler


@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", marks=ON_A_GPU)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_plain_steps(name: str, mode: str | None) -> None:
    from torch._dynamo.utils import counters

    expected, _ = train(name, compiles=False)
    counters.clear()
    found, scaler = train(name, compiles=True, mode=mode)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert scaler.get_scale() == 256.0
    if mode is not None:
        assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("how", ["fused", "compiled"])
def test_an_iteration_of_float16_training_waits_for_nothing(
    how: str, record_property: Callable[[str, object], None]
) -> None:
    model = make_model()
    compiled = torch.compile(model, backend="amp_fx", options={"dtype": "fp16"})
    given: dict[str, Any] = {} if how == "compiled" else {how: True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **given)
    scaler = amp_fx.GradScaler(init_scale=256.0)
    step = scaler.compile_step(optimizer, max_norm=1.0) if how == "compiled" else None
    data = list(batches(8))
    waits = 0
    for number, (x, y) in enumerate(data):
        is_warm = number >= 5
        with counted_waits() as found:
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(compiled(x), y)).backward()  # type: ignore[no-untyped-call]
            if step is not None:
                step()
            else:
                scaler.unscale_and_clip_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        waits += len(found) if is_warm else 0
    record_property(f"host waits in 3 iterations, {how}", waits)
    assert waits == 0


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """What waits for the device, as torch warns of it."""
    import warnings

    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]

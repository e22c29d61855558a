"""The gradient scaler on CUDA: nothing waits, and what only a device does differently."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from tests.gpu.place import MARKS, ON_CUDA
from tests.grad_scaler.loops import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [*MARKS, ON_CUDA]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
BAD = (None, None, math.inf, None, math.nan, None, None)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_params() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 30), (50,), ())
    return [torch.nn.Parameter(torch.randn(s, generator=generator).cuda()) for s in shapes]


def set_grads(scaler: Any, params: list[torch.Tensor], bad: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = scaler.scale(torch.ones((), device="cuda"))
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).cuda() * scale
    if bad is not None:
        assert params[0].grad is not None
        params[0].grad.view(-1)[0].fill_(bad)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_nothing_waits(optimizer_name: str, max_norm: float | None) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[optimizer_name](params)
    scaler = amp_fx.GradScaler(growth_interval=2)
    twins = make_params()
    twin_optimizer = OPTIMIZERS[optimizer_name](twins)
    twin_scaler = torch.amp.GradScaler(growth_interval=2)
    reports = []
    for seed, bad in enumerate(BAD):
        set_grads(scaler, params, bad, seed)
        with no_waits() if seed else contextlib.nullcontext():
            if max_norm is not None:
                scaler.unscale_and_clip_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
        reports.append(scaler.last_step)
        set_grads(twin_scaler, twins, bad, seed)
        if max_norm is not None:
            twin_scaler.unscale_(twin_optimizer)
            torch.nn.utils.clip_grad_norm_(twins, max_norm)
        twin_scaler.step(twin_optimizer)
        twin_scaler.update()
        if bad is not None:  # gradients of a skipped step may differ
            for param in (*params, *twins):
                param.grad = None
        torch.testing.assert_close(
            snapshot(scaler, params, optimizer), snapshot(twin_scaler, twins, twin_optimizer)
        )
    assert [report and report.skipped for report in reports] == [bad is not None for bad in BAD]


def test_an_iteration_of_float16_training_waits_for_nothing() -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    model = torch.nn.Sequential(*layers).cuda()
    compiled = torch.compile(model, backend="amp_fx", options={"dtype": "fp16"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = amp_fx.GradScaler(init_scale=256.0)
    for number in range(8):
        x, y = torch.randn(16, 32).cuda(), torch.randn(16, 8).cuda()
        with no_waits() if number >= 5 else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(compiled(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_and_clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()


def test_a_step_of_any_other_optimizer_waits_once() -> None:
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = amp_fx.GradScaler()
    set_grads(scaler, params, None, 0)
    with no_waits():
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="synchroniz"):
            scaler.step(optimizer)


def test_bfloat16_gradients() -> None:
    """Unscales bfloat16 gradients, which torch's kernel for CUDA rejects."""
    for bad, expected in ((None, 2.0**16), (math.inf, 2.0**15)):
        param = torch.nn.Parameter(torch.zeros(4, device="cuda", dtype=torch.bfloat16))
        scaler = amp_fx.GradScaler()
        scaler.scale(torch.ones((), device="cuda"))
        param.grad = torch.full_like(param, 3 * 2.0**16)
        if bad is not None:
            param.grad[1] = bad
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == ([-3.0] * 4 if bad is None else [0.0] * 4)
        assert scaler.get_scale() == expected


def test_gradients_that_were_moved_to_the_host() -> None:
    on_device, on_host = make_params()[0], torch.nn.Parameter(torch.zeros(3))
    for bad in (None, math.nan):
        scaler = amp_fx.GradScaler(init_scale=8.0)
        scaler.scale(torch.ones((), device="cuda"))
        on_device.grad = torch.full_like(on_device, 16.0)
        on_host.grad = torch.tensor([16.0, 8.0, 16.0 if bad is None else bad])
        optimizer = torch.optim.SGD([on_device, on_host], lr=0.0)
        scaler.unscale_(optimizer)
        assert on_host.grad.tolist()[:2] == [2.0, 1.0]
        assert (on_device.grad == 2.0).all()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if bad is None else 4.0)


def test_the_scale_is_seen_without_waiting_before_it_is_too_small() -> None:
    """Lowers the host's bound with every update of unknown outcome, until it reads the scale."""
    params = make_params()
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = amp_fx.GradScaler(init_scale=64.0)
    for seed in range(40):
        set_grads(scaler, params, None, seed)
        with no_waits():
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.synchronize()
    assert scaler.get_scale() == 64.0
    assert scaler._bound.value >= 1.0


def test_reports_on_a_device() -> None:
    params = make_params()
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = amp_fx.GradScaler(named_parameters=[("weight", params[0])])
    set_grads(scaler, params, math.nan, 0)
    with no_waits():
        scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step is not None
    assert [(o.name, o.num_nan) for o in scaler.last_step.overflows] == [("weight", 1)]

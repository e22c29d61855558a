"""Nothing waits for the device that does not have to.

On the CPU every value is at hand, so these tests make the scaler treat tensors as if they were on
a device: it may not peek, and any read through the dispatcher fails.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx.devices import host_copy
from amp_fx.grad_scaler import eager_step, loss_scale, reports
from amp_fx.tables.presets import torch_version
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads, snapshot


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails when a value is read to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Tensor) -> None:
        return None

    monkeypatch.setattr(loss_scale, "peek", unknown)


class Capturable(torch.optim.Adam):
    """Stands in for an Adam with capturable=True, which the CPU does not run."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["capturable"] = True

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["capturable"] = False
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return super().step(closure)
        finally:
            self.param_groups[0]["capturable"] = True


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    return Capturable(params) if name == "capturable" else OPTIMIZERS[name](params)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize(
    "optimizer_name", ["adamw-fused", "sgd-fused", "adagrad-fused", "capturable"]
)
@pytest.mark.parametrize("call", ["step", "unscale", "clip"])
def test_training_reads_nothing(optimizer_name: str, call: str) -> None:
    """And gives the numbers of an ordinary run."""
    if optimizer_name == "adagrad-fused" and torch_version() < (2, 13):
        pytest.skip("fused Adagrad takes no scale before torch 2.13")
    results = []
    for may_read in (False, True):
        params = make_params((4, 3), (5,))
        optimizer = make_optimizer(optimizer_name, params)
        grad_scaler = amp_fx.GradScaler("cpu", growth_interval=2)
        for seed, bad in enumerate((None, None, math.inf, None, math.nan, None, None)):
            set_scaled_grads(grad_scaler, params, bad, seed)
            if seed == 0 or may_read:  # the first step of a capturable optimizer makes its state
                one_iteration(grad_scaler, optimizer, call)
            else:
                with NoReads():
                    one_iteration(grad_scaler, optimizer, call)
        results.append(snapshot(grad_scaler, [p.detach() for p in params], optimizer))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def one_iteration(grad_scaler: amp_fx.GradScaler, optimizer: Any, call: str) -> None:
    if call == "unscale":
        grad_scaler.unscale_(optimizer)
    elif call == "clip":
        grad_scaler.unscale_and_clip_(optimizer, 0.5)
    grad_scaler.step(optimizer)
    grad_scaler.update()


@pytest.mark.usefixtures("_as_on_a_device")
def test_other_optimizers_read_one_value_a_step() -> None:
    params = make_params((4, 3), (5,))
    grad_scaler = amp_fx.GradScaler("cpu")
    set_scaled_grads(grad_scaler, params, None)
    with pytest.raises(AssertionError, match="a value was read"), NoReads():
        grad_scaler.step(torch.optim.SGD(params, lr=0.1))


@pytest.mark.usefixtures("_as_on_a_device")
def test_reports_are_looked_up_when_asked() -> None:
    params = make_params((4, 3), (5,))
    optimizer = OPTIMIZERS["adamw-fused"](params)
    grad_scaler = amp_fx.GradScaler("cpu")
    set_scaled_grads(grad_scaler, params, math.inf)
    with NoReads():
        grad_scaler.step(optimizer)
        grad_scaler.update()
        report = grad_scaler.last_step
        assert repr(report) == "StepReport(skipped=<on the device>)"
    assert report is not None
    assert report.skipped
    assert [overflow.num_inf for overflow in report.overflows] == [1]
    (record,) = grad_scaler.history()
    assert record == reports.UpdateRecord(2.0**16, 2.0**15, True, report.overflows)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("how", ["cleared", "next iteration"])
def test_what_was_not_asked_in_time_is_not_made_up(how: str) -> None:
    """Gradients that came later are never taken for those of the step."""
    params = make_params((4, 3), (5,))
    optimizer = OPTIMIZERS["adamw-fused"](params)
    grad_scaler = amp_fx.GradScaler("cpu")
    set_scaled_grads(grad_scaler, params, math.inf)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    report = grad_scaler.last_step
    assert report is not None
    if how == "cleared":
        optimizer.zero_grad()
    else:
        set_scaled_grads(grad_scaler, params, math.nan)
    assert report.skipped
    assert report.overflows == ()
    assert "parameters not known" in repr(report)


@pytest.mark.usefixtures("_as_on_a_device")
def test_small_scales_are_noticed_without_looking() -> None:
    """A finite gradient that overflows when unscaled is caught though nobody knows the scale."""
    params = make_params((2,))
    optimizer = OPTIMIZERS["adamw-fused"](params)
    grad_scaler = amp_fx.GradScaler("cpu", init_scale=4.0, backoff_factor=0.1)
    before = params[0].detach().clone()
    for grad in (math.inf, math.inf, math.inf, math.inf, 1e37):  # 4e-4, and 1e37 / 4e-4 overflows
        grad_scaler.scale(torch.ones(()))
        params[0].grad = torch.tensor([grad, 1.0])
        with NoReads():
            grad_scaler.step(optimizer)
            grad_scaler.update()
    assert torch.equal(params[0], before)
    assert grad_scaler.get_scale() == pytest.approx(4e-5)


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of clones that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.now += out.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(out, self.freed, out.numel())
        return out

    def freed(self, count: int) -> None:
        self.now -= count


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("has_hook", [False, True])
def test_a_capturable_step_copies_a_part_at_a_time(
    has_hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, moments and counters of as many parameters as fit; with a hook, of all."""
    adam = sys.modules["torch.optim.adam"]  # which torch.optim hides
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    monkeypatch.setattr(eager_step, "MOST_ELEMENTS", 24)
    results = []
    calls: list[None] = []
    for may_split in (True, False):
        params = make_params((4, 3), (5,), (4, 3), (30,), (2,))
        groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
        optimizer = torch.optim.Adam(groups, lr=0.1, capturable=True, foreach=True)
        if has_hook or not may_split:
            optimizer.register_step_post_hook(lambda *_: calls.append(None))
        grad_scaler = amp_fx.GradScaler("cpu", growth_interval=2)
        for seed, bad in enumerate((None, math.inf, None, math.nan, None)):
            set_scaled_grads(grad_scaler, params, bad, seed)
            with Alive() as alive:
                one_iteration(grad_scaler, optimizer, "unscale")
            is_split = may_split and not has_hook
            if seed:
                assert alive.most == (3 * 30 + 1 if is_split else 3 * 61 + 5)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
        results.append(snapshot(grad_scaler, [p.detach() for p in params], optimizer))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert len(calls) == (10 if has_hook else 5)


def test_the_bound_of_the_scale_follows_copies_that_arrive_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ``torch.xpu``, which has no graphs to capture in all torches: a copy takes two updates."""
    copies: deque[tuple[Tensor, Tensor]] = deque()
    monkeypatch.setattr(host_copy, "queue", lambda to, x: copies.append((to, x.clone())))
    monkeypatch.setattr(loss_scale, "module_with_queues", lambda _: object())
    monkeypatch.setattr(loss_scale, "peek", lambda _: None)
    on_host = loss_scale.HostScale(64.0)
    scale, bounds, seen = torch.tensor(64.0), [], []
    for step in range(6):
        if step % 3 == 2:
            target, source = copies.popleft()
            target.copy_(source)
        on_host.expect_update(0.5, 0.0, skipped=None)
        on_host.follow_update(scale, 0.0)
        bounds.append(on_host.lower_bound)
        seen.append(on_host.seen)
        assert len(copies) <= 1
        scale.fill_(48.0)
    # A copy says what the scale was when it was started, and each update since may have halved it.
    assert bounds == [32.0, 16.0, 16.0, 8.0, 4.0, 6.0]
    assert seen == [64.0] * 5 + [48.0]


def test_which_devices_copy_to_the_host_unwaited_for() -> None:
    with FakeTensorMode():
        scales = {d: torch.empty((), device=d) for d in ("cpu", "cuda", "xpu", "mps")}
    found = {d: loss_scale.module_with_queues(scale) for d, scale in scales.items()}
    assert found == {"cpu": None, "cuda": torch.cuda, "xpu": torch.xpu, "mps": None}

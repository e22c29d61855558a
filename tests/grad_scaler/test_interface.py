"""The rest of torch.amp.GradScaler's interface: scaling, settings, state, pickling."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import amp_fx
from tests.grad_scaler.loops import make_params, set_scaled_grads


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def make_scaler(**settings: Any) -> amp_fx.GradScaler:
    return amp_fx.GradScaler("cpu", init_scale=4.0, **settings)


def test_is_a_torch_scaler() -> None:
    assert isinstance(make_scaler(), torch.amp.GradScaler)


def test_defaults_are_torchs() -> None:
    assert amp_fx.GradScaler("cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()


def test_constructor_takes_torchs_arguments_by_position() -> None:
    scaler = amp_fx.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True).state_dict()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_default_scaler_disables_itself() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = amp_fx.GradScaler()
    assert not scaler.is_enabled()


def test_scale_keeps_the_structure() -> None:
    x = torch.tensor([1.0, 2.0])
    scaler = make_scaler()
    scaled = scaler.scale([x, (x, [x]), Pair(x, x), {"x": x}])
    assert isinstance(scaled[2], Pair)
    assert torch.equal(scaled[0], 4 * x)
    assert torch.equal(scaled[1][1][0], 4 * x)
    assert torch.equal(scaled[2].b, 4 * x)
    assert torch.equal(scaled[3]["x"], 4 * x)
    assert [t.tolist() for t in scaler.scale(x for _ in range(2))] == [[4.0, 8.0]] * 2


@pytest.mark.parametrize("value", ["loss", 3.0, None, [torch.ones(()), "loss"]])
def test_scale_refuses_what_is_no_tensor(value: Any) -> None:
    with pytest.raises(ValueError, match="Tensor or an iterable of Tensors"):
        make_scaler().scale(value)


def test_scale_is_differentiable() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    make_scaler().scale(x * x).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.item() == 4.0 * 6.0


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scaling_overflows_no_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, expected: torch.dtype
) -> None:
    scaled = amp_fx.GradScaler("cpu").scale(torch.full(shape, 3.0, dtype=dtype))
    assert scaled.dtype is expected
    assert (scaled == 3 * 2.0**16).all()


def test_update_takes_numbers_and_tensors() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(()))
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    for shape in ((), (1,), (1, 1)):
        tensor = torch.full(shape, 32.0)
        scaler.update(tensor)
        tensor.fill_(64.0)
        assert scaler.get_scale() == 32.0
        scaler.update(8.0)


def test_settings() -> None:
    scaler = make_scaler()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(5)
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 5
    assert scaler.is_enabled()


def trained(scaler: Any) -> Any:
    """A scaler in the middle of a growth interval."""
    params = make_params((3,))
    optimizer = torch.optim.SGD(params, lr=0.1)
    for bad in (float("inf"), None, None):
        set_scaled_grads(scaler, params, bad)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.amp.GradScaler, amp_fx.GradScaler),
        (amp_fx.GradScaler, torch.amp.GradScaler),
        (amp_fx.GradScaler, amp_fx.GradScaler),
    ],
)
def test_state_dicts_load_both_ways(source: Any, target: Any, is_used: bool) -> None:
    state = trained(source("cpu", growth_factor=3.0, backoff_factor=0.25)).state_dict()
    assert state["scale"] == 2.0**14
    assert state["_growth_tracker"] == 2
    scaler = trained(target("cpu")) if is_used else target("cpu")
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler.scale(torch.ones(())).item() == 2.0**14


def test_state_dicts_may_hold_their_numbers_as_tensors() -> None:
    """As some ways to save a checkpoint leave them."""
    state = trained(amp_fx.GradScaler("cpu")).state_dict()
    scaler = amp_fx.GradScaler("cpu")
    as_tensors = {key: torch.tensor(value) for key, value in state.items()}
    scaler.load_state_dict(types.MappingProxyType(as_tensors))  # type: ignore[arg-type]
    assert scaler.state_dict() == state


def test_growth_goes_on_after_loading() -> None:
    scaler = amp_fx.GradScaler("cpu", growth_interval=3)
    scaler.load_state_dict({**trained(make_scaler()).state_dict(), "growth_interval": 3})
    params = make_params((3,))
    set_scaled_grads(scaler, params, None)
    scaler.step(torch.optim.SGD(params, lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 2.0 * 2.0


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_go_on_alone(clone: Any) -> None:
    scaler = trained(make_scaler(growth_interval=3, min_scale=0.5, allow_fp16=True))
    twin = clone(scaler)
    assert twin.state_dict() == scaler.state_dict()
    trained(twin)
    assert scaler.get_scale() == 2.0
    params = make_params((3,), dtype=torch.float16)
    set_scaled_grads(twin, params, None)
    twin.unscale_(torch.optim.SGD(params, lr=0.1))  # allow_fp16 came along


def test_pickling_is_refused_in_the_middle_of_an_iteration() -> None:
    scaler, params = make_scaler(), make_params((3,))
    set_scaled_grads(scaler, params, None)
    scaler.unscale_(torch.optim.SGD(params, lr=0.1))
    with pytest.raises(AssertionError, match="beginning of an iteration"):
        pickle.dumps(scaler)


def test_a_disabled_scaler_is_transparent() -> None:
    scaler = amp_fx.GradScaler("cpu", enabled=False)
    params = make_params((3,))
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    params[0].grad = torch.tensor([3.0, 4.0, 0.0])
    before = params[0].detach().clone()
    scaler.unscale_(optimizer)
    assert scaler.unscale_and_clip_(optimizer, 1.0).item() == 5.0
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, 0.8, 0.0]))
    assert scaler.step(optimizer, lambda: 7.0) == 7.0
    torch.testing.assert_close(params[0].detach(), before - torch.tensor([0.6, 0.8, 0.0]))
    scaler.update()
    scaler.update(3.0)
    assert scaler.step_scheduler(scheduler)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.history() == []
    assert scaler.last_step is None


def test_step_returns_what_the_optimizer_returns() -> None:
    class Answering(torch.optim.SGD):
        def step(self, closure: Any = None, *, answer: Any = None) -> Any:
            super().step(closure)
            return answer

    scaler, params = make_scaler(), make_params((3,))
    optimizer = Answering(params, lr=0.1)
    for bad, expected in ((None, "stepped"), (float("inf"), None)):
        set_scaled_grads(scaler, params, bad)
        assert scaler.step(optimizer, answer="stepped") == expected
        scaler.update()

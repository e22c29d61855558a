"""The rest of the scaler's interface: containers, disabled scalers, what was removed."""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_default_scaler_disables_itself() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = amp_fx.GradScaler()
    assert not scaler.is_enabled()


def test_scale_keeps_the_structure() -> None:
    x = torch.tensor([1.0, 2.0])
    scaler = make_scaler()
    scaled: Any = scaler.scale([x, (x, [x]), Pair(x, x), {"x": x}])
    assert isinstance(scaled[2], Pair)
    assert torch.equal(scaled[0], 4 * x)
    assert torch.equal(scaled[1][1][0], 4 * x)
    assert torch.equal(scaled[2].b, 4 * x)
    assert torch.equal(scaled[3]["x"], 4 * x)
    assert [t.tolist() for t in scaler.scale(x for _ in range(2))] == [[4.0, 8.0]] * 2


@pytest.mark.parametrize("value", [3.0, None, [torch.ones(()), 3.0], {"loss": None}])
def test_scale_refuses_what_is_no_tensor(value: Any) -> None:
    with pytest.raises(ValueError, match="Tensor or an iterable of Tensors"):
        make_scaler().scale(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_scale_gives_the_dtype_that_torch_gives(dtype: torch.dtype) -> None:
    for shape in ((), (2,)):
        ours, theirs = (
            kind("cpu").scale(torch.full(shape, 3.0, dtype=dtype))
            for kind in (amp_fx.GradScaler, torch.amp.GradScaler)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


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


def test_state_dicts_may_hold_their_numbers_as_tensors() -> None:
    """Loads numbers as tensors, which some checkpoint formats contain."""
    state = make_scaler(growth_factor=3.0).state_dict()
    scaler = amp_fx.GradScaler("cpu")
    as_tensors = {key: torch.tensor(value) for key, value in state.items()}
    scaler.load_state_dict(types.MappingProxyType(as_tensors))  # type: ignore[arg-type]
    assert scaler.state_dict() == state
    assert all(type(value) is type(state[key]) for key, value in scaler.state_dict().items())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_have_the_settings_and_go_on_alone(clone: Any) -> None:
    scaler = make_scaler(min_scale=0.5, allow_fp16=True)
    scaler.scale(torch.ones(()))
    twin = clone(scaler)
    twin.scale(torch.ones(()))
    twin.update(2.0)
    assert scaler.get_scale() == 4.0
    params = make_params((3,), dtype=torch.float16)
    set_scaled_grads(twin, params, None)
    twin.unscale_(torch.optim.SGD(params, lr=0.1))  # allow_fp16 came along


def test_a_disabled_scaler_is_transparent() -> None:
    scaler = amp_fx.GradScaler("cpu", enabled=False)
    params = make_params((3,))
    optimizer = torch.optim.SGD(params, lr=1.0)
    losses = [torch.ones(())]
    assert scaler.scale(losses) is losses
    params[0].grad = torch.tensor([3.0, 4.0, 0.0])
    before = params[0].detach().clone()
    scaler.unscale_(optimizer)
    assert scaler.unscale_and_clip_(optimizer, 1.0).item() == 5.0
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, 0.8, 0.0]))
    assert scaler.step(optimizer, lambda: 7.0) == 7.0
    torch.testing.assert_close(params[0].detach(), before - torch.tensor([0.6, 0.8, 0.0]))
    scaler.update()
    scaler.update(3.0)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.last_step is None
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == {}


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

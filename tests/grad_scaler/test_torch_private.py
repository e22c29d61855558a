"""What the scaler relies on in functions of torch that are not public."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_fx.grad_scaler import torch_private


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_check_and_unscale_looks_before_it_multiplies(dtype: torch.dtype) -> None:
    grads = [torch.tensor([8.0, 4.0], dtype=dtype), torch.zeros(0, dtype=dtype)]
    found_inf = torch.zeros(())
    torch_private.check_and_unscale_(grads, found_inf, torch.tensor(0.5))
    assert grads[0].tolist() == [4.0, 2.0]
    assert found_inf.item() == 0.0
    torch_private.check_and_unscale_(grads, found_inf, torch.tensor(math.inf))
    assert found_inf.item() == 0.0  # what it made infinite it does not see
    torch_private.check_and_unscale_(grads, found_inf, torch.tensor(1.0))
    assert found_inf.item() == 1.0
    grads[0].fill_(1.0)
    torch_private.check_and_unscale_(grads, found_inf, torch.tensor(1.0))
    assert found_inf.item() == 1.0  # it never clears the flag


def test_which_dtypes_have_a_kernel() -> None:
    cpu = torch.device("cpu")
    assert torch_private.has_check_and_unscale(cpu, torch.bfloat16)
    assert not torch_private.has_check_and_unscale(cpu, torch.complex64)


@pytest.mark.parametrize(
    ("found", "tracker", "expected"),
    [(0.0, 0, (8.0, 1)), (0.0, 2, (16.0, 0)), (1.0, 2, (4.0, 0)), (2.0, 0, (4.0, 0))],
)
def test_update_scale(found: float, tracker: int, expected: tuple[float, int]) -> None:
    scale, growth = torch.tensor(8.0), torch.tensor(tracker, dtype=torch.int32)
    torch_private.update_scale_(scale, growth, torch.tensor(found), 2.0, 0.5, 3)
    assert (scale.item(), growth.item()) == expected


def test_the_scale_never_grows_to_infinity() -> None:
    scale, growth = torch.tensor(2.0**127), torch.tensor(0, dtype=torch.int32)
    torch_private.update_scale_(scale, growth, torch.zeros(()), 2.0, 0.5, 1)
    assert scale.item() == 2.0**127


def test_groups_keep_the_tensors_and_their_order() -> None:
    tensors = [torch.ones(2), torch.ones(2).half(), torch.ones(3), torch.eye(2).to_sparse()]
    groups = torch_private.group_by_device_and_dtype(tensors)
    cpu = torch.device("cpu")
    assert groups.keys() == {(cpu, torch.float32), (cpu, torch.float16)}
    singles = groups[cpu, torch.float32]
    assert all(a is b for a, b in zip(singles, [tensors[0], *tensors[2:]], strict=True))


class WithHook(torch.optim.SGD):
    """Somebody's own step, which must not be bypassed."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return "own"


def test_bare_steps_step() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    plain, own = torch.optim.SGD([param], lr=1.0), WithHook([param], lr=1.0)
    with torch.no_grad():
        torch_private.bare_step(plain)()
    assert param.tolist() == [-1.0, -1.0]
    assert torch_private.bare_step(own)() == "own"
    assert param.tolist() == [-2.0, -2.0]
    calls = []
    plain.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch_private.bare_step(plain)()
    assert calls == ["hook"]


def test_whether_only_torchs_own_code_runs() -> None:
    def make(kind: Any = torch.optim.SGD) -> Any:
        return kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)

    assert torch_private.runs_only_own_code(make())
    assert torch_private.runs_only_own_code(make(torch.optim.Adafactor))
    assert not torch_private.runs_only_own_code(make(WithHook))

    scheduled, replaced = make(), make()
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    assert torch_private.runs_only_own_code(scheduled)
    replaced.step = functools.wraps(replaced.step)(lambda *_: None)
    assert not torch_private.runs_only_own_code(replaced)
    scheduled.step = functools.wraps(scheduled.step)(lambda *_: None)
    assert not torch_private.runs_only_own_code(scheduled)

    hook = register_optimizer_step_post_hook(lambda *_: None)
    assert not torch_private.runs_only_own_code(make())
    hook.remove()
    assert torch_private.runs_only_own_code(make())


def test_schedulers_know_of_a_marked_step() -> None:
    """Torch warns if a scheduler is stepped before its optimizer; warnings are errors here."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    torch_private.mark_stepped(optimizer)
    scheduler.step()

"""torch_private.optimizers and group_by_device_and_dtype: what is relied on."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_fx.torch_private import optimizers, tensors
from amp_fx.weights.write_signals import after_step


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_kernel_looks_before_it_multiplies(dtype: torch.dtype) -> None:
    grads = [torch.tensor([8.0, 4.0], dtype=dtype), torch.zeros(0, dtype=dtype)]
    found_inf = torch.zeros(())
    optimizers.unscale_and_check_(grads, found_inf, torch.tensor(0.5))
    assert grads[0].tolist() == [4.0, 2.0]
    assert found_inf.item() == 0.0
    optimizers.unscale_and_check_(grads, found_inf, torch.tensor(math.inf))
    assert found_inf.item() == 0.0  # what it made infinite it does not see
    optimizers.unscale_and_check_(grads, found_inf, torch.tensor(1.0))
    assert found_inf.item() == 1.0
    grads[0].fill_(1.0)
    optimizers.unscale_and_check_(grads, found_inf, torch.tensor(1.0))
    assert found_inf.item() == 1.0  # it never clears the flag


def test_groups_keep_the_tensors_and_their_order() -> None:
    given = [torch.ones(2), torch.ones(2).half(), torch.ones(3), torch.eye(2).to_sparse()]
    groups = tensors.group_by_device_and_dtype(given)
    by_dtype = {group[0].dtype: group for group in groups}
    assert len(groups) == len(by_dtype) == 2
    singles = by_dtype[torch.float32]
    assert all(a is b for a, b in zip(singles, [given[0], *given[2:]], strict=True))


class WithHook(torch.optim.SGD):
    """Somebody's own step, which must not be bypassed."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return "own"


def test_whether_only_torchs_own_code_runs() -> None:
    def runs_only_own_code(optimizer: Any) -> bool:
        return optimizers.runs_only_own_code(optimizer, allowed=(after_step,))

    def make(kind: Any = torch.optim.SGD) -> Any:
        return kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)

    assert runs_only_own_code(make())
    assert runs_only_own_code(make(torch.optim.Adafactor))
    assert not runs_only_own_code(make(WithHook))

    scheduled, replaced = make(), make()
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    assert runs_only_own_code(scheduled)
    replaced.step = functools.wraps(replaced.step)(lambda *_: None)
    assert not runs_only_own_code(replaced)
    scheduled.step = functools.wraps(scheduled.step)(lambda *_: None)
    assert not runs_only_own_code(scheduled)

    hook = register_optimizer_step_post_hook(lambda *_: None)
    assert not runs_only_own_code(make())
    hook.remove()
    assert runs_only_own_code(make())


def test_schedulers_know_of_a_marked_step() -> None:
    """Torch warns if a scheduler is stepped before its optimizer; warnings are errors here."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizers.mark_stepped(optimizer)
    scheduler.step()


def overflow(scaler: torch.amp.GradScaler, param: torch.Tensor) -> None:
    scaler.scale(torch.ones(()))
    param.grad = torch.full_like(param, math.inf)


def test_torch_leaves_arguments_on_a_fused_optimizer_whose_step_raises() -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param], fused=True)
    before = dict(vars(optimizer))
    optimizer.register_step_pre_hook(fail)
    for context in (contextlib.nullcontext(), optimizers.restored_on_error(optimizer)):
        scaler = torch.amp.GradScaler("cpu")
        overflow(scaler, param)
        for name in optimizers._FUSED_ARGUMENTS:
            vars(optimizer).pop(name, None)
        with pytest.raises(ZeroDivisionError), context:
            scaler.step(optimizer)
        is_left = isinstance(context, contextlib.nullcontext)
        left = set(optimizers._FUSED_ARGUMENTS) if is_left else set()
        assert set(vars(optimizer)) - set(before) == left


@pytest.mark.parametrize("fused", [False, True])
def test_only_a_fused_step_that_is_skipped_stores_momentum(fused: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    overflow(scaler, param)
    assert optimizers.states_with_momentum(optimizer) == []
    scaler.step(optimizer)
    assert len(optimizers.states_with_momentum(optimizer)) == fused

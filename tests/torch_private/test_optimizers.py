"""torch_private.optimizers and group_by_device_and_dtype: what is relied on."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import pytest
import torch

from amp_fx.torch_private import optimizers, tensors


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


def test_fused_optimizers_are_those_whose_step_torchs_scaler_calls_after_an_overflow() -> None:
    for fused in (False, True):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([param], fused=fused)
        calls: list[Any] = []
        optimizer.register_step_pre_hook(lambda *args, calls=calls: calls.append(args))
        scaler = torch.amp.GradScaler("cpu")
        overflow(scaler, param)
        scaler.step(optimizer)
        assert optimizers.is_fused(optimizer) == bool(calls) == fused


def test_hooks_and_wrappers_observe_steps() -> None:
    def new() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])

    scheduled = new()
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert not optimizers.is_step_observed(new())
    assert not optimizers.is_step_observed(scheduled)  # the wrapper only serves a warning
    wrapped = new()
    wrapped.step = functools.partial(wrapped.step)  # type: ignore[method-assign, assignment]
    assert optimizers.is_step_observed(wrapped)
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        hooked = new()
        handle = getattr(hooked, register)(lambda *_: None)
        assert optimizers.is_step_observed(hooked)
        handle.remove()
        assert not optimizers.is_step_observed(hooked)

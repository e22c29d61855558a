"""The scaler does what torch.amp.GradScaler does, bit for bit, call by call."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import amp_fx
from tests.grad_scaler.loops import OPTIMIZERS, assert_same, make_params, set_scaled_grads, snapshot

BAD = {"finite": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}
SHAPES = ((4, 3), (5,), ())


class Run:
    """A scaler with two optimizers that share it."""

    def __init__(self, scaler_class: Any, optimizer: str, **settings: Any) -> None:
        self.scaler = scaler_class("cpu", **settings)
        self.params = [make_params(*SHAPES), make_params(*SHAPES[:1])]
        self.optimizers = [OPTIMIZERS[optimizer](params) for params in self.params]
        self.seed = 0

    def backward(self, which: int, bad: float | None) -> None:
        self.seed += 1
        set_scaled_grads(self.scaler, self.params[which], bad, self.seed)

    def numbers(self) -> list[torch.Tensor]:
        pairs = zip(self.params, self.optimizers, strict=True)
        return [t for params, opt in pairs for t in snapshot(self.scaler, params, opt)]


def both(optimizer: str, **settings: Any) -> tuple[Run, Run]:
    return (
        Run(amp_fx.GradScaler, optimizer, **settings),
        Run(torch.amp.GradScaler, optimizer, **settings),
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_table_of_finite_and_infinite_steps(optimizer: str, unscale_first: bool) -> None:
    runs = both(optimizer, init_scale=2.0**10, growth_interval=2)
    table = ["finite", "finite", "inf", "finite", "nan", "finite", "finite", "finite", "-inf"]
    for bad in table:
        for run in runs:
            run.backward(0, BAD[bad])
            if unscale_first:
                run.scaler.unscale_(run.optimizers[0])
        assert_same(runs[0].numbers(), runs[1].numbers())
        for call in ("step", "update"):
            for run in runs:
                run.scaler.step(run.optimizers[0]) if call == "step" else run.scaler.update()
            assert_same(runs[0].numbers(), runs[1].numbers())


iterations = st.lists(
    st.fixed_dictionaries(
        {
            "bad": st.lists(st.sampled_from(sorted(BAD)), min_size=2, max_size=2),
            "unscale": st.lists(st.booleans(), min_size=2, max_size=2),
            "use_second": st.booleans(),
            "new_scale": st.sampled_from([None, None, None, 2.0**-6, 0.7, 3.0, 1e6]),
        }
    ),
    max_size=12,
)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    optimizer=st.sampled_from(["adamw-foreach", "adamw-fused", "sgd-momentum"]),
    init_scale=st.sampled_from([2.0**16, 2.0**3, 3.0, 1000.0]),
    growth_factor=st.sampled_from([2.0, 1.5]),
    backoff_factor=st.sampled_from([0.5, 0.3]),
    growth_interval=st.integers(1, 3),
    iterations=iterations,
)
def test_any_sequence(
    optimizer: str,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    iterations: list[dict[str, Any]],
) -> None:
    runs = both(
        optimizer,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    for plan in iterations:
        for which in range(1 + plan["use_second"]):
            for run in runs:
                run.backward(which, BAD[plan["bad"][which]])
                if plan["unscale"][which]:
                    run.scaler.unscale_(run.optimizers[which])
            assert_agree(runs)
            for run in runs:
                run.scaler.step(run.optimizers[which])
            assert_agree(runs)
        for run in runs:
            run.scaler.update(plan["new_scale"])
        assert_agree(runs)


def assert_agree(runs: tuple[Run, Run]) -> None:
    assert_same(runs[0].numbers(), runs[1].numbers())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_whatever_the_default_dtype(dtype: torch.dtype, optimizer: str) -> None:
    """The scale and its flags are float32 all the same."""
    runs = both(optimizer, init_scale=2.0**10, growth_interval=2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for bad in (None, None, math.inf, None):
            for run in runs:
                run.backward(0, bad)
                run.scaler.unscale_(run.optimizers[0])
                run.scaler.step(run.optimizers[0])
                run.scaler.update()
                run.backward(1, bad)
                run.scaler.step(run.optimizers[1])
                run.scaler.update()
    finally:
        torch.set_default_dtype(before)
    assert_agree(runs)


def test_fused_contract() -> None:
    """A user's own factor on `grad_scale` counts, and both attributes are gone afterwards."""
    runs = both("adamw-fused", init_scale=8.0)
    for run in runs:
        run.backward(0, None)
        run.optimizers[0].grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        run.scaler.step(run.optimizers[0])
    assert_same(runs[0].numbers(), runs[1].numbers())
    assert not hasattr(runs[0].optimizers[0], "grad_scale")
    assert not hasattr(runs[0].optimizers[0], "found_inf")


@pytest.mark.parametrize(("bad", "flag"), [(None, 0.0), (math.inf, 1.0)])
def test_hooks_see_what_torch_promises(bad: float | None, flag: float) -> None:
    """Without them nobody would, and a flag of 0 is not handed to torch's own code."""
    run = Run(amp_fx.GradScaler, "adamw-fused", init_scale=8.0)
    optimizer = run.optimizers[0]
    seen = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend([optimizer.grad_scale.item(), optimizer.found_inf.item()])
    )
    run.backward(0, bad)
    run.scaler.step(optimizer)
    assert seen == [8.0, flag]


def test_custom_optimizers_get_scale_and_flag() -> None:
    """What torch promises to optimizers with `_step_supports_amp_scaling`."""

    class Recorder(torch.optim.SGD):
        _step_supports_amp_scaling = True
        seen: tuple[Any, Any] = (None, None)

        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            self.seen = (self.grad_scale, self.found_inf)  # type: ignore[attr-defined]
            return "stepped"

    for bad, flag in ((None, 0.0), (math.inf, 1.0)):
        params = make_params((3,))
        optimizer = Recorder(params, lr=0.1)
        scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
        set_scaled_grads(scaler, params, bad)
        assert scaler.step(optimizer) == "stepped"
        assert [t.item() for t in optimizer.seen] == [128.0, flag]
        scaler.update()
        set_scaled_grads(scaler, params, None)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert optimizer.seen[0] is None


def test_optimizers_that_take_the_scaler_itself() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # noqa: ARG002
            found = grad_scaler._check_inf_per_device(self)
            assert grad_scaler._found_inf_per_device(self) is found
            return sum(flag.item() for flag in found.values())

    params = make_params((3,))
    optimizer = Old(params, lr=0.1)
    scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
    set_scaled_grads(scaler, params, math.nan)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        assert scaler.step(optimizer) == 1.0
    scaler.update()
    assert scaler.get_scale() == 64.0


def test_a_flag_of_0_is_not_taken_off_step_counters() -> None:
    """Which is a third of what scaling adds to fused Adam; torch's scaler has it done."""
    num_passes = []
    for scaler_class in (amp_fx.GradScaler, torch.amp.GradScaler):
        run = Run(scaler_class, "adamw-fused")
        run.backward(0, None)
        run.scaler.step(run.optimizers[0])  # makes the state
        run.scaler.update()
        run.backward(0, None)
        with torch.profiler.profile() as profile:
            run.scaler.step(run.optimizers[0])
        num_passes.append(sum(event.name == "aten::_foreach_sub_" for event in profile.events()))
    assert num_passes == [0, 1]

"""The scaler does what torch.amp.GradScaler does, bit for bit, call by call, misuse included."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import pickle
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import amp_fx
from tests.grad_scaler.loops import (
    OPTIMIZERS,
    assert_same,
    make_params,
    nan_in_uninitialized_memory,
    set_scaled_grads,
    snapshot,
)

BAD = {"finite": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}
SHAPES = ((4, 3), (5,), ())


class Run:
    """A scaler with two optimizers that share it, and gradients for both."""

    def __init__(self, kind: Any, optimizer: str, **settings: Any) -> None:
        self.kind, self.settings = kind, settings
        self.scaler = kind("cpu", **settings)
        self.params = [make_params(*SHAPES), make_params(*SHAPES[:1])]
        self.optimizers = [OPTIMIZERS[optimizer](params) for params in self.params]
        self.seed = 0
        for which in range(2):
            self.backward(which, "finite")

    def backward(self, which: int, bad: str) -> None:
        self.seed += 1
        set_scaled_grads(self.scaler, self.params[which], BAD[bad], self.seed)

    def unscale(self, which: int, _: str) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def step(self, which: int, _: str) -> None:
        self.scaler.step(self.optimizers[which])

    def update(self, which: int, bad: str) -> None:
        self.scaler.update([2.0**-6, 0.7, 3.0, 1e6][which * 2] if bad == "nan" else None)

    def iterate(self, which: int, bad: str) -> None:
        self.backward(which, bad)
        self.step(which, bad)
        self.update(0, "finite")

    def closure(self, which: int, _: str) -> None:
        self.scaler.step(self.optimizers[which], closure=lambda: 0.0)

    def pickled(self, which: int, _: str) -> None:
        copied: Any = pickle.loads(pickle.dumps(self.scaler)) if which else None
        self.scaler = copied or copy.deepcopy(self.scaler)

    def saved(self, which: int, _: str) -> None:
        """Into a scaler of the other class and back."""
        other: Any = {amp_fx.GradScaler: torch.amp, torch.amp.GradScaler: amp_fx}[self.kind]
        scaler, fresh = other.GradScaler("cpu"), self.kind("cpu")
        scaler.load_state_dict(self.scaler.state_dict())
        self.scaler = fresh if which else self.scaler
        self.scaler.load_state_dict(scaler.state_dict())

    def changed(self, which: int, _: str) -> None:
        self.scaler.set_growth_interval(which + 1)
        self.scaler.set_growth_factor(1.5)
        self.scaler.set_backoff_factor(0.3)

    def numbers(self) -> list[torch.Tensor]:
        pairs = zip(self.params, self.optimizers, strict=True)
        return [t for params, opt in pairs for t in snapshot(self.scaler, params, opt)]


ACTIONS = ["iterate", "backward", "unscale", "step", "update", "closure"]
RARE_ACTIONS = ["pickled", "saved", "changed"]

actions = st.tuples(
    st.sampled_from(4 * ACTIONS + RARE_ACTIONS),
    st.integers(0, 1),
    st.sampled_from(["finite", "finite", *BAD]),
)


def pair(optimizer: str, **settings: Any) -> tuple[Run, Run]:
    """Returns a run with our scaler and one with torch's."""
    ours = Run(amp_fx.GradScaler, optimizer, **settings)
    return ours, Run(torch.amp.GradScaler, optimizer, **settings)


def outcome(run: Run, action: str, which: int, bad: str) -> Exception | None:
    try:
        getattr(run, action)(which, bad)
    except (AssertionError, RuntimeError) as error:
        return error
    return None


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.example("adamw", 8.0, 2.0, 0.5, 1, [("closure", 0, "finite"), ("pickled", 0, "finite")])
@hypothesis.given(
    optimizer=st.sampled_from(["adamw-foreach", "adamw-fused", "sgd-momentum"]),
    init_scale=st.sampled_from([2.0**16, 2.0**3, 3.0, 1000.0]),
    growth_factor=st.sampled_from([2.0, 1.5]),
    backoff_factor=st.sampled_from([0.5, 0.3]),
    growth_interval=st.integers(1, 3),
    plan=st.lists(actions, max_size=20),
)
def test_any_sequence_of_calls(
    optimizer: str,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    plan: list[tuple[str, int, str]],
) -> None:
    """Errors are of torch's class and begin with torch's words; all numbers are torch's."""
    settings: dict[str, Any] = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    ours, theirs = pair(optimizer, **settings)
    for action in plan:
        error, expected = outcome(ours, *action), outcome(theirs, *action)
        assert isinstance(error, type(expected))
        assert str(error).startswith(str(expected).rstrip("."))
        assert_same(ours.numbers(), theirs.numbers())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_each_optimizer(optimizer: str, unscale_first: bool) -> None:
    ours, theirs = pair(optimizer, init_scale=2.0**10, growth_interval=2)
    for bad in ["finite", "finite", "inf", "finite", "nan", "finite", "finite", "finite", "-inf"]:
        calls = ["backward", "unscale", "step", "update"] if unscale_first else ["iterate"]
        for call in calls:
            for run in (ours, theirs):
                getattr(run, call)(0, "finite" if call == "update" else bad)
            assert_same(ours.numbers(), theirs.numbers())


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    momentum=st.sampled_from([0.0, 0.9]),
    dampening=st.sampled_from([0.0, 0.5]),
    with_late_group=st.booleans(),
    overflows=st.lists(st.sampled_from(["finite", "inf", "nan"]), min_size=1, max_size=6),
)
def test_fused_sgd_is_plain_sgd(
    momentum: float, dampening: float, with_late_group: bool, overflows: list[str]
) -> None:
    """Torch does not initialize momentum buffers, nor does it write them in skipped steps."""
    results = []
    with nan_in_uninitialized_memory():
        for fused in (False, True):
            params, late = make_params(*SHAPES), make_params(*SHAPES)
            settings: dict[str, Any] = {"momentum": momentum, "dampening": dampening}
            optimizer = torch.optim.SGD(params, lr=0.1, fused=fused, **settings)
            scaler = amp_fx.GradScaler("cpu")
            for number, bad in enumerate([*overflows, "finite", "finite"]):
                if number == 1 and with_late_group:
                    optimizer.add_param_group({"params": late})
                    params = [*params, *late]
                set_scaled_grads(scaler, params, BAD[bad], number)
                scaler.step(optimizer)
                scaler.update()
            for param in params:
                param.grad = None
            results.append(snapshot(scaler, params, optimizer))
    torch.testing.assert_close(results[1], results[0])


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("overflow", ["finite", "inf"])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_fused_step_that_raises_leaves_nothing_behind(
    register: str, overflow: str, unscale_first: bool
) -> None:
    """Raises in a hook of the first step, after which the steps equal those of plain SGD."""
    results = []
    with nan_in_uninitialized_memory():
        for fused in (False, True):
            first, second = make_params(*SHAPES), make_params(*SHAPES)
            groups = [{"params": first}, {"params": second}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=fused)
            scaler = amp_fx.GradScaler("cpu", init_scale=8.0)
            raises = overflow == "finite"  # hooks are not called if the step is skipped
            hook = getattr(optimizer, register)(fail)
            for number, bad in enumerate([overflow, "finite", "finite"]):
                set_scaled_grads(scaler, first, BAD[bad], number)
                set_scaled_grads(scaler, second, None, number)
                if unscale_first and number == 0:
                    scaler.unscale_(optimizer)
                with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
                    scaler.step(optimizer)
                scaler.update()
                hook.remove()
                raises = False
            results.append([param.detach() for param in (*first, *second)])
    torch.testing.assert_close(results[1], results[0])


def test_a_raising_step_keeps_a_scale_that_the_user_gave() -> None:
    [param] = make_params((2,))
    optimizer = OPTIMIZERS["adamw-fused"]([param])
    scaler = amp_fx.GradScaler("cpu")
    optimizer.grad_scale = given = torch.tensor(2.0)  # type: ignore[attr-defined]
    set_scaled_grads(scaler, [param], None)
    with optimizer.register_step_pre_hook(fail), pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert optimizer.grad_scale is given  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "found_inf")


def test_a_subclass_of_sgd_has_defaults_of_its_own() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            torch.optim.Optimizer.__init__(self, params, {"lr": 0.5})

        def step(self, *_: Any) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data -= 0.5 * param.grad

    param = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = amp_fx.GradScaler("cpu"), Own([param])
    set_scaled_grads(scaler, [param], None)
    expected = param - 0.5 * cast("torch.Tensor", param.grad) / scaler.get_scale()
    scaler.step(optimizer)
    assert torch.equal(param, expected)


def test_class_signature_and_defaults_are_torchs() -> None:
    assert issubclass(amp_fx.GradScaler, torch.amp.GradScaler)
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    ours = list(inspect.signature(amp_fx.GradScaler).parameters.items())
    positional = {name: p for name, p in ours if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert [(p.name, p.default) for p in positional.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]
    assert amp_fx.GradScaler("cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_whatever_the_default_dtype(dtype: torch.dtype, optimizer: str) -> None:
    """Keeps the scale and its flags in float32."""
    ours, theirs = pair(optimizer, init_scale=2.0**10, growth_interval=2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for bad in ("finite", "finite", "inf", "finite"):
            for run in (ours, theirs):
                run.backward(0, bad)
                run.unscale(0, bad)
                run.step(0, bad)
                run.update(0, "finite")
                run.iterate(1, bad)
    finally:
        torch.set_default_dtype(before)
    assert_same(ours.numbers(), theirs.numbers())


def test_fused_contract() -> None:
    """Applies a user's factor on `grad_scale`, and deletes both attributes afterwards."""
    ours, theirs = pair("adamw-fused", init_scale=8.0)
    for run in (ours, theirs):
        run.optimizers[0].grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        run.step(0, "finite")
    assert_same(ours.numbers(), theirs.numbers())
    assert not hasattr(ours.optimizers[0], "grad_scale")
    assert not hasattr(ours.optimizers[0], "found_inf")


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
    assert scaler.last_step is not None
    assert scaler.last_step.skipped
    scaler.update()
    assert scaler.get_scale() == 64.0

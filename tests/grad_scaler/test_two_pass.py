"""Steps in two passes, next to torch's optimizers, scaler and clipping, one after the other."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import amp_fx
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.grad_scaler.compiled_step import PlainStep
from amp_fx.grad_scaler.two_pass import rule_of
from tests.grad_scaler.loops import make_params, set_scaled_grads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

SHAPES = ((4, 3), (5,), (1,), (0, 2))
MAX_NORM = 0.5


def two_groups(kind: Any, first: dict[str, Any], second: dict[str, Any]) -> Make:
    return lambda params: kind(
        [{"params": params[:1], **first}, {"params": params[1:], **second}], lr=0.1
    )


def with_options(kind: Any, **options: Any) -> Make:
    return lambda params: kind(params, **{"lr": 0.1, **options})


ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
MAKERS: dict[str, Make] = {
    "adamw": with_options(ADAMW),
    "adamw, no decay": with_options(ADAMW, weight_decay=0.0),
    "adamw, amsgrad": with_options(ADAMW, amsgrad=True),
    "adamw, maximize": with_options(ADAMW, maximize=True),
    "adamw, foreach": with_options(ADAMW, foreach=True),
    "adamw, fused": with_options(ADAMW, fused=True),
    "adamw, low betas": with_options(ADAMW, betas=(0.3, 0.4), eps=1e-3),
    "adamw, rate in a tensor": with_options(ADAMW, lr=torch.tensor(0.1, dtype=torch.float64)),
    "adam": with_options(ADAM),
    "adam, decay": with_options(ADAM, weight_decay=0.1, amsgrad=True, maximize=True),
    "adam, decoupled": with_options(ADAM, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": with_options(SGD),
    "sgd, momentum": with_options(SGD, momentum=0.9),
    "sgd, nesterov": with_options(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, dampening": with_options(SGD, momentum=0.9, dampening=0.5, maximize=True),
    "sgd, fused": with_options(SGD, momentum=0.9, fused=True),
    "groups": two_groups(
        ADAMW, {"lr": 0.01, "amsgrad": True}, {"weight_decay": 0.0, "maximize": True}
    ),
    "groups, one without momentum": two_groups(SGD, {"momentum": 0.9}, {"momentum": 0.0}),
}


def numbers(params: Sequence[Tensor], optimizer: Any) -> list[Tensor]:
    """The weights, and all that the optimizer keeps of them."""
    found = [param.detach().clone() for param in params]
    for param in params:
        state = optimizer.state.get(param, {})
        kept = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
        found += [value.to(torch.float64) for value in kept]
    return found


def with_scaler(
    make: Make,
    bads: Sequence[float | None],
    *,
    max_norm: float | None = MAX_NORM,
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> list[list[Tensor]]:
    """All numbers after each step; in two passes if anything is given to ``compile_step``."""
    shapes = (*SHAPES, ()) if dtype is torch.float32 else SHAPES
    params = make_params(*shapes, dtype=dtype)
    optimizer = make(params)
    scaler: Any = (amp_fx if given else torch.amp).GradScaler("cpu", growth_interval=2)
    step = scaler.compile_step(optimizer, max_norm=max_norm, **given) if given else None
    found = []
    for seed, bad in enumerate(bads):
        set_scaled_grads(scaler, params, bad, seed)
        if step is not None:
            step()
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, max_norm or math.inf)
            scaler.step(optimizer)
            scaler.update()
        scale = torch.tensor(scaler.get_scale(), dtype=torch.float64)
        found.append([*numbers(params, optimizer), scale])
    return found


def without_scaler(make: Make, num_steps: int, **given: Any) -> list[list[Tensor]]:
    params = make_params(*SHAPES, dtype=torch.float64)
    optimizer = make(params)
    # A schedule that moves betas, too.
    step = amp_fx.compile_step(optimizer, max_norm=MAX_NORM, **given) if given else None
    found = []
    for seed in range(num_steps):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        for group in optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (0.9 - seed / 50, group["betas"][1])
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] *= 0.9
        if step is not None:
            step()
        else:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
        found.append(numbers(params, optimizer))
    return found


@pytest.fixture
def in_two_passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each step that took two passes."""
    runs: list[None] = []
    run = PlainStep._run

    def noting(self: Any, *args: Any) -> Any:
        runs.append(None)
        return run(self, *args)

    monkeypatch.setattr(PlainStep, "_run", noting)
    return runs


CACHED: dict[str, Any] = {"compiler": "aot_eager", "weight_cache": "training"}
BADS = (None, None, math.inf, None, math.nan, None)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "max_norm"), [*((name, MAX_NORM) for name in MAKERS), ("adamw", None)]
)
def test_the_formulas_are_torchs(
    name: str, max_norm: float | None, in_two_passes: list[None]
) -> None:
    """In float64, where roundings hide nothing; torch's scaler and clipping come before them."""
    expected = with_scaler(MAKERS[name], BADS, max_norm=max_norm)
    actual = with_scaler(MAKERS[name], BADS, max_norm=max_norm, backend="eager")
    # Fused kernels take the norm and the step size in float64 as well.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    assert len(in_two_passes) == len(BADS) - (name != "sgd")


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_the_formulas_are_torchs_through_inductor() -> None:
    expected = with_scaler(MAKERS["adamw"], BADS, dtype=torch.float32)
    actual = with_scaler(MAKERS["adamw"], BADS, dtype=torch.float32, backend="inductor")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["adamw", "adam, decay", "sgd, nesterov", "groups"])
def test_the_formulas_are_torchs_without_a_scaler(name: str) -> None:
    """Schedules compile nothing anew: there are two graphs, one for each pass."""
    counter = CompileCounterWithBackend("eager")
    expected = without_scaler(MAKERS[name], 4)
    actual = without_scaler(MAKERS[name], 4, backend=counter)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    assert counter.frame_count == 2


class Own(torch.optim.AdamW):
    """Somebody's own: its step may be anything."""


OTHERS: dict[str, Make] = {
    "rmsprop": with_options(torch.optim.RMSprop),
    "adagrad, fused": with_options(torch.optim.Adagrad, fused=True),
    "a class of somebody's own": with_options(Own),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "train",
    [functools.partial(with_scaler, bads=BADS), functools.partial(without_scaler, num_steps=3)],
    ids=["scaler", "no scaler"],
)
def test_others_run_eagerly_and_say_so(train: Any, name: str, in_two_passes: list[None]) -> None:
    expected = train(OTHERS[name])
    with pytest.warns(UserWarning, match="run eagerly, .* require torch's Adam") as warned:
        actual = train(OTHERS[name], backend="eager")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not in_two_passes
    assert [warning.filename for warning in warned] == [__file__]


def test_hooks_are_run(in_two_passes: list[None]) -> None:
    params = make_params((3,))
    optimizer = ADAMW(params)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    step = amp_fx.compile_step(optimizer, backend="eager")
    params[0].grad = torch.ones(3)
    with pytest.warns(UserWarning, match="run eagerly"):
        step()
    step()
    assert len(seen) == 2
    assert not in_two_passes


@pytest.mark.parametrize("start", [0, 1], ids=["same", "overlapping"])
def test_weights_that_share_memory_get_all_updates(start: int, in_two_passes: list[None]) -> None:
    def train(*, is_compiled: bool) -> Tensor:
        memory = torch.arange(1.0, 6.0)
        params = [torch.nn.Parameter(memory[:3]), torch.nn.Parameter(memory[start : start + 3])]
        optimizer = ADAMW(params)
        step = amp_fx.compile_step(optimizer, backend="eager") if is_compiled else optimizer.step
        compiled = [
            torch.compile(lambda x, p=p: x @ p[:, None], backend="amp_fx", options=CACHED)
            for p in params
        ]
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = sum(function(torch.ones(2, 3)).float().sum() for function in compiled)
            loss.backward()
            step()
        return memory

    with pytest.warns(UserWarning, match="weights that share no memory"):
        actual = train(is_compiled=True)
    torch.testing.assert_close(actual, train(is_compiled=False), rtol=0, atol=0)
    assert not in_two_passes


def low_params() -> list[Tensor]:
    return make_params((3,), dtype=torch.bfloat16)


def sparse_params() -> list[Tensor]:
    return make_params((3, 2))


@pytest.mark.parametrize(
    ("make", "grad"),
    [
        (low_params, torch.ones_like),
        (sparse_params, lambda p: torch.ones_like(p).to_sparse()),
        (lambda: make_params((), dtype=torch.float64), torch.ones_like),
    ],
    ids=["low", "sparse", "float64 without dimensions"],
)
def test_what_does_not_fit_runs_eagerly(make: Any, grad: Any, in_two_passes: list[None]) -> None:
    results = []
    for is_compiled in (False, True):
        params = make()
        optimizer = SGD(params, lr=0.1)
        step: Any = amp_fx.compile_step(optimizer) if is_compiled else optimizer.step
        for i in range(3):
            params[0].grad = grad(params[0])
            says = pytest.warns(UserWarning, match="dense float32 or float64")
            with says if is_compiled and not i else contextlib.nullcontext():
                step()
        results.append(params[0].detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not in_two_passes


@pytest.mark.parametrize("writes", [False, True])
def test_what_gradients_are_afterwards(writes: bool) -> None:
    params = make_params((4, 3), (5,))
    optimizer = ADAMW(params)
    scaler = amp_fx.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    step = scaler.compile_step(optimizer, max_norm=0.5, write_grads=writes, backend="eager")
    for seed in range(3):
        set_scaled_grads(scaler, params, None, seed)
        scaled = [param.grad.clone() for param in params if param.grad is not None]
        step()
    assert step.norm is not None
    factor = 0.5 / (step.norm + 1e-6) / 8.0 if writes else torch.ones(())
    expected = [grad * factor for grad in scaled]
    torch.testing.assert_close([param.grad for param in params], expected)
    norm = torch.cat([grad.flatten() for grad in scaled]).norm() / 8.0
    torch.testing.assert_close(step.norm, norm)


def test_overflows_are_counted_in_gradients_that_stay_scaled() -> None:
    """With a scale below 1, by which finite gradients overflow, those among them."""
    params = make_params((4,))
    optimizer = ADAMW(params)
    scaler = amp_fx.GradScaler("cpu", init_scale=2.0**-20, named_parameters=[("w", params[0])])
    step = scaler.compile_step(optimizer, backend="eager")
    for grad in ([1.0] * 4, [3e38, 1.0, math.nan, 2.0]):
        scaler.scale(torch.ones(()))
        params[0].grad = torch.tensor(grad)
        before = params[0].detach().clone()
        step()
    assert scaler.last_step is not None
    [overflow] = scaler.last_step.overflows
    assert str(overflow) == "w (1 inf, 1 nan of 4)"
    torch.testing.assert_close(params[0].detach(), before, rtol=0, atol=0)


def test_a_disabled_scaler_steps_in_two_passes(in_two_passes: list[None]) -> None:
    results = []
    for scaler in (amp_fx.GradScaler("cpu", enabled=False), None):
        params = make_params((4, 3))
        optimizer = ADAMW(params)
        compile_step: Any = amp_fx.compile_step if scaler is None else scaler.compile_step
        step = compile_step(optimizer, max_norm=0.5, backend="eager")
        for _ in range(3):
            params[0].grad = torch.full((4, 3), 2.0)
            step()
        results.append([params[0].detach(), step.norm])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert len(in_two_passes) == 2 * 2


def test_state_that_was_loaded_is_stepped_at_once(in_two_passes: list[None]) -> None:
    results = []
    for is_compiled in (False, True):
        params = make_params((4, 3))
        optimizer = ADAMW(params)
        params[0].grad = torch.ones(4, 3)
        optimizer.step()
        resumed = ADAMW(params)
        resumed.load_state_dict(optimizer.state_dict())
        (amp_fx.compile_step(resumed, backend="eager") if is_compiled else resumed.step)()
        results.append(numbers(params, resumed))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert len(in_two_passes) == 1


def test_many_optimizers_do_not_run_into_dynamos_limit() -> None:
    """Each has code of its own: none is left uncompiled because of others."""
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(1, 5):
            params = make_params((size,))
            step = amp_fx.compile_step(SGD(params, lr=0.1), backend=counter)
            params[0].grad = torch.ones(size)
            step()
    assert counter.frame_count == 2 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"differentiable": True},
        {"lr": torch.tensor(0.1, requires_grad=True)},
        {"lr": 0.1, "betas": (torch.tensor(0.9), torch.tensor(0.999)), "capturable": True},
    ],
    ids=["differentiable", "rate that is learned", "betas in tensors"],
)
def test_there_is_no_rule_for_settings_that_are_not_numbers(options: dict[str, Any]) -> None:
    optimizer = ADAMW(make_params((3,)))
    assert rule_of(optimizer) is not None
    optimizer.param_groups[0].update(options)
    assert rule_of(optimizer) is None


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(["adamw", "adamw, amsgrad", "sgd, nesterov"]),
    st.lists(st.sampled_from((None, None, math.inf, -math.inf, math.nan)), min_size=3, max_size=8),
)
def test_any_sequence_of_overflows(name: str, bads: list[float | None]) -> None:
    expected = with_scaler(MAKERS[name], bads)
    actual = with_scaler(MAKERS[name], bads, backend="eager")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)

"""Compiles that fail leave nothing behind in the thread, wherever they fail."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import compile_lock
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_fx.regions.state import AutocastState, in_disabled_region, nesting
from tests.needs import CPP_COMPILER
from tests.programs import Run, assert_same_bits, compiled, run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

bf16 = torch.bfloat16


def can_be_taken(lock: Any) -> bool:
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def thread_state() -> dict[str, Any]:
    """Returns what a compile changes for its thread, or for the process."""
    hooks_are_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    torch._C._autograd._saved_tensors_hooks_set_tracing(hooks_are_tracing)
    configs = (inductor_config, functorch_config, torch._dynamo.config, torch.compiler.config)
    return {
        "autocast": AutocastState.ambient(),
        "no device": torch.is_autocast_enabled("ipu"),
        "regions": (nesting(), in_disabled_region()),
        "excluded keys": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "included keys": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "modes": (
            torch._C._len_torch_function_stack(),
            _get_current_dispatch_mode_stack(),
            torch._C._functorch.get_dynamic_layer_stack_depth(),
        ),
        "tracing": (
            TracingContext.try_get(),
            torch.compiler.is_compiling(),
            torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
            hooks_are_tracing,
        ),
        "configs": [config.get_config_copy() for config in configs],
        "callbacks": (list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)),
        "filters": (
            list(warnings.filters),
            list(logging.getLogger("torch._subclasses.fake_tensor").filters),
        ),
        "lock": can_be_taken(compile_lock),
    }


class Failure:
    """Raises the error when ``shift`` is traced for the n-th time."""

    def __init__(self) -> None:
        self.countdown = 0
        self.error: type[BaseException] = RuntimeError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error("on purpose")
        return torch.empty_like(x)


failure = Failure()


@torch.library.custom_op("amp_fx_test::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.library.custom_op("amp_fx_test::shift_backward", mutates_args=())
def shift_backward(grad: torch.Tensor) -> torch.Tensor:
    return grad.clone()


shift.register_fake(failure)
shift_backward.register_fake(failure)
shift.register_autograd(lambda _, grad: shift_backward(grad))


class Double(torch.autograd.Function):
    """Opaque to the rewrite: it runs between markers of a region."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = shift(x) * 2
        return doubled

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = shift_backward(grads[0]) * 2
        return doubled


def program(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Reads each weight once: graphs that are not rewritten cast it for each read."""
    u, v, w = weights
    y: torch.Tensor = Double.apply(shift(x @ u) @ v)  # type: ignore[no-untyped-call]
    return y @ w


@pytest.fixture(autouse=True)
def _no_failure_afterwards() -> Iterator[None]:
    yield
    failure.countdown = 0


def assert_clean_wherever_it_fails(run: Callable[[], None], error: type[BaseException]) -> None:
    """Compiles and runs a program until it fails nowhere any more."""
    failure.error = error
    for num_traced in itertools.count(1):
        torch._dynamo.reset()
        failure.countdown = num_traced
        before = thread_state()
        try:
            run()
        except AssertionError:
            raise
        except BaseException:  # noqa: BLE001 - Dynamo and AOTAutograd wrap what they raise
            has_run = False
        else:
            has_run = True
        assert thread_state() == before
        if failure.countdown > 0:
            break
    assert has_run
    assert num_traced > 10


@pytest.mark.one_in(3)
@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("mode", "error", "fallback"),
    [
        ("bare", RuntimeError, False),
        ("bare", KeyboardInterrupt, True),
        ("in a region", RuntimeError, True),
    ],
)
def test_each_time_that_an_op_is_traced(
    mode: str, error: type[BaseException], fallback: bool, rng: torch.Generator
) -> None:
    args = [torch.randn(4, 4, generator=rng).requires_grad_() for _ in range(4)]
    expected = run_program(program, args, bf16)
    outputs = [out.float() for out in expected.outputs] if mode == "bare" else expected.outputs

    def run() -> None:
        options: Any = {"compiler": "aot_eager", "fallback": fallback}
        # Unless the graph must be whole, torch 2.15 may skip the function and run it as it is.
        call: Any = torch.compile(
            program, backend="amp_fx", options=options, fullgraph=not fallback
        )
        actual = run_program(call, args, None if mode == "bare" else bf16)
        assert_same_bits(actual, Run(outputs, expected.grads))

    assert_clean_wherever_it_fails(run, error)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return program(x, *self.weights)


@pytest.mark.slow
@CPP_COMPILER
@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_training", [pytest.param(True, marks=pytest.mark.slow), False])
def test_each_time_that_inductor_traces_it(is_training: bool, rng: torch.Generator) -> None:
    """Covers training, and inference, where the weights are frozen."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 4, generator=rng)
    with torch.autocast("cpu", bf16):
        expected = net(x).float()

    def run() -> None:
        call = compiled(net, compiler="inductor")
        with torch.set_grad_enabled(is_training):
            actual = call(x)
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.1)
        if is_training:
            actual.sum().backward()

    assert_clean_wherever_it_fails(run, RuntimeError)


class Cache(nn.Module):
    """Writes one row per call, at a position that is a tensor."""

    rows: torch.Tensor
    position: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)
        self.register_buffer("rows", torch.zeros(8, 32))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.rows[self.position] = y[0]
        self.position += 1
        return self.rows


@pytest.mark.one_in(3)
@pytest.mark.falls_back
@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"weight_cache": False}])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=CPP_COMPILER)])
def test_a_row_that_is_written_where_a_tensor_says(
    compiler: str, options: dict[str, Any], rng: torch.Generator
) -> None:
    torch.manual_seed(0)
    ours, eager = Cache(), Cache()
    eager.load_state_dict(ours.state_dict())
    call = compiled(ours, compiler=compiler, **options)
    for _ in range(3):
        x = torch.randn(2, 16, generator=rng)
        with torch.autocast("cpu", bf16):
            expected = eager(x)
        torch.testing.assert_close(call(x), expected, rtol=0, atol=0)
        assert not in_disabled_region()
    assert expected.any(1).sum() == 3


@torch.library.custom_op("amp_fx_test::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise RuntimeError("on purpose")
    return x.clone()


refuse.register_fake(torch.empty_like)


class InRegion(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", bf16):
            y: torch.Tensor = refuse(x @ x)
        return y.float()

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_call_that_fails_in_a_region_of_a_function() -> None:
    def apply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = InRegion.apply(x)  # type: ignore[no-untyped-call]
        return result

    call = compiled(apply)
    call(torch.zeros(2, 2, requires_grad=True))
    before = thread_state()
    with pytest.raises(RuntimeError, match="on purpose"):
        call(torch.ones(2, 2, requires_grad=True))
    assert thread_state() == before

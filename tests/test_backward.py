"""The autocast state of a backward: that in which eager code runs it, or it at least runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.needs import CPP_COMPILER
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

bf16 = torch.bfloat16

pytestmark = [
    # Dynamo makes an instance to find out what a user's function does.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

INDUCTOR = pytest.param("inductor", marks=CPP_COMPILER)
COMPILERS = ["eager", "aot_eager"]


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", bf16)


def product(*, saves_low: bool, is_decorated: bool) -> Any:
    """Makes a function with a float32 result, whose backward multiplies its float32 gradient."""

    def same(function: Any) -> Any:
        return function

    forward_decorator = torch.amp.custom_fwd(device_type="cpu") if is_decorated else same
    backward_decorator = torch.amp.custom_bwd(device_type="cpu") if is_decorated else same

    class Product(torch.autograd.Function):
        @staticmethod
        @forward_decorator  # type: ignore[untyped-decorator]
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*((a.bfloat16(), b.bfloat16()) if saves_low else (a, b)))
            return (a @ b).float()

        @staticmethod
        @backward_decorator  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return torch.mm(grad, b.t()).float(), torch.mm(a.t(), grad).float()

    return Product


def calling(function: Any) -> Program:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function.apply(a, b) * 1.5
        return result

    return program


def in_full(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a product in float32, whose gradients are products in float32."""
    low = a @ b
    with torch.autocast("cpu", enabled=False):
        return low.float() @ b


def gradients(call: Program, *, is_inside: bool, is_step: bool = False) -> list[torch.Tensor]:
    """Returns the result and the gradients of a call in a region.

    Args:
        call: The program.
        is_inside: Whether ``backward()`` is called in the region.
        is_step: Whether the program calls ``backward()``.
    """
    rng = torch.Generator().manual_seed(0)
    # Sums of such integers are exact in float32 in any order, and not in bfloat16.
    a, b, seed = (torch.randint(-20, 21, (8, 8), generator=rng).float() for _ in range(3))
    a.requires_grad_()
    b.requires_grad_()
    with autocast():
        result = call(a, b)
        if is_inside and not is_step:
            torch.autograd.backward(result, seed)
    if not is_inside:
        torch.autograd.backward(result, seed)
    assert a.grad is not None
    assert b.grad is not None
    return [result.detach(), a.grad, b.grad]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("saves_low", [True, False])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_custom_bwd(compiler: str, saves_low: bool, is_inside: bool) -> None:
    program = calling(product(saves_low=saves_low, is_decorated=True))
    expected = gradients(program, is_inside=is_inside)
    assert_same(gradients(compiled(program, compiler=compiler), is_inside=is_inside), expected)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_outside_of_the_region_autocast_is_off(compiler: str) -> None:
    for program in (calling(product(saves_low=False, is_decorated=False)), in_full):
        torch._dynamo.reset()
        expected = gradients(program, is_inside=False)
        assert_same(gradients(compiled(program, compiler=compiler), is_inside=False), expected)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_inside_of_the_region_a_backward_op_by_op_is_in_it(compiler: str) -> None:
    """The gradient of a float32 product is computed in the region, as in eager code."""
    expected = gradients(in_full, is_inside=True)
    assert_same(gradients(compiled(in_full, compiler=compiler), is_inside=True), expected)


@pytest.mark.parametrize("compiler", [*COMPILERS, INDUCTOR])
def test_a_float32_gradient_times_a_low_value(compiler: str) -> None:
    program = calling(product(saves_low=True, is_decorated=False))
    expected = gradients(program, is_inside=True)
    assert_same(gradients(compiled(program, compiler=compiler), is_inside=True), expected)
    with pytest.raises(RuntimeError, match="same dtype"):
        gradients(program, is_inside=False)


@pytest.mark.parametrize("compiler", ["aot_eager", INDUCTOR])
def test_where_eager_code_fails_it_is_that_of_torch_compile(compiler: str) -> None:
    program = calling(product(saves_low=True, is_decorated=False))
    native = torch.compile(program, backend="aot_eager")
    expected = gradients(native, is_inside=False)
    torch._dynamo.reset()
    assert_same(gradients(compiled(program, compiler=compiler), is_inside=False), expected)


@torch.library.custom_op("amp_fx_test::low_product", mutates_args=())
def low_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.bfloat16() @ b.bfloat16()).float()


@low_product.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*(each.bfloat16() for each in inputs))


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    a, b = ctx.saved_tensors
    return torch.mm(grad, b.t()).float(), torch.mm(a.t(), grad).float()


low_product.register_autograd(_backward, setup_context=_save)


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_backward_of_a_custom_op(is_inside: bool) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = low_product(a, b) * 1.5
        return result

    native = torch.compile(program, backend="aot_eager")
    expected = gradients(native, is_inside=is_inside)
    torch._dynamo.reset()
    actual = gradients(compiled(program, compiler="aot_eager"), is_inside=is_inside)
    assert_same(actual, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "program",
    [
        calling(product(saves_low=True, is_decorated=False)),
        calling(product(saves_low=False, is_decorated=False)),
        in_full,
    ],
)
@pytest.mark.parametrize("way", ["tensor.backward", "autograd.backward", "autograd.grad"])
def test_a_step_in_a_region_has_autocast_on(way: str, program: Program, compiler: str) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        loss = program(a, b).sum()
        if way == "tensor.backward":
            loss.backward()  # type: ignore[no-untyped-call]
        elif way == "autograd.backward":
            torch.autograd.backward(loss)
        else:
            a.grad, b.grad = torch.autograd.grad(loss, (a, b))
        return a

    expected = gradients(step, is_inside=True, is_step=True)
    actual = gradients(compiled(step, compiler=compiler), is_inside=True, is_step=True)
    assert_same(actual, expected)


@CPP_COMPILER
def test_kernels_of_a_backward_get_the_dtypes_that_they_are_compiled_for() -> None:
    """Calls ``backward()`` in the region, which runs the compiled ops unchanged."""
    expected = gradients(in_full, is_inside=False)
    assert_same(gradients(compiled(in_full, compiler="inductor"), is_inside=True), expected)


MODES: dict[str, tuple[Any, Any]] = {
    "bare": (contextlib.nullcontext, contextlib.nullcontext),
    "inside": (autocast, contextlib.nullcontext),
    "around": (contextlib.nullcontext, autocast),
}
"""Regions of the forward and of the whole step."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compiler", "mode"),
    [
        *((compiler, mode) for compiler in COMPILERS for mode in MODES),
        pytest.param("inductor", "inside", marks=CPP_COMPILER),
    ],
)
def test_compiled_autograd(compiler: str, mode: str, rng: torch.Generator) -> None:
    """Compares gradients with eager: no part of the backward runs in a separate region."""
    x, weight = (torch.randn(8, 8, generator=rng) for _ in range(2))
    forward, around = MODES[mode]

    def run(wrap: Callable[[Any], Any], forward: Any) -> list[torch.Tensor]:
        w = weight.clone().requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            with forward():
                loss = in_full(x, w).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with around():
            loss = wrap(step)(x)
        assert w.grad is not None
        return [loss.detach().float(), w.grad]

    expected = run(lambda step: step, autocast if mode == "bare" else forward)
    options = {"numerics": "eager"} if compiler == "inductor" else {}
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = run(lambda step: compiled(step, compiler=compiler, **options), forward)
    assert_same(actual, expected)

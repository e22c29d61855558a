"""custom_function: custom_fwd and custom_bwd, eager and compiled."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx.errors import OptionError, RegionError
from tests.programs import assert_same_bits, compiled, run_program

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def make_function(
    decorators: Any, cast_inputs: torch.dtype | None
) -> type[torch.autograd.Function]:
    """Returns a product whose backward is not the forward's derivative: twice the gradient."""

    class Product(torch.autograd.Function):
        @staticmethod
        @decorators.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @decorators.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return 2 * (grad @ b.t()).to(a.dtype), 2 * (a.t() @ grad).to(b.dtype)

    return Product


# Dynamo makes an instance to find out what a user's function does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch's own, where a graph starts with an activation.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def apply(function: Any, *args: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


@pytest.fixture
def args(rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 3, generator=rng).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("cast_inputs", [None, f16, f32])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("custom_fwd", [amp_fx.custom_fwd, torch.amp.custom_fwd])
def test_same_as_torch_amp(
    custom_fwd: Any, enabled: bool, cast_inputs: torch.dtype | None, args: tuple[torch.Tensor, ...]
) -> None:
    """Includes a forward with torch's decorator next to a backward with ours."""
    ours = SimpleNamespace(custom_fwd=custom_fwd, custom_bwd=amp_fx.custom_bwd)
    runs = [
        run_program(make_function(decorators, cast_inputs).apply, args, bf16 if enabled else None)
        for decorators in (ours, torch.amp)
    ]
    assert_same_bits(*runs)


@pytest.mark.parametrize("cast_inputs", [None, f16])
def test_compiled_as_eager(cast_inputs: torch.dtype | None, args: tuple[torch.Tensor, ...]) -> None:
    function = make_function(amp_fx, cast_inputs)

    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        return apply(function, a, b)

    eager, ours = run_program(call, args, bf16), run_program(compiled(call), args, bf16)
    assert eager.outputs[0].dtype == (cast_inputs or bf16)
    assert_same_bits(ours, eager)


def make_function_with_setup_context(
    cast_inputs: torch.dtype | None, seen: list[Any] | None = None
) -> type[torch.autograd.Function]:
    """Returns the function of ``make_function``, whose ``ctx`` is set up outside of ``forward``."""

    class Product(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @amp_fx.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if seen is not None:
                seen.append((*(each.dtype for each in inputs), output.dtype))
            ctx.save_for_backward(*inputs)

        @staticmethod
        @amp_fx.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return 2 * (grad @ b.t()).to(a.dtype), 2 * (a.t() @ grad).to(b.dtype)

    return Product


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("cast_inputs", [None, f16, f32])
@pytest.mark.parametrize("enabled", [True, False])
def test_setup_context_is_as_a_forward_with_ctx(
    is_compiled: bool,
    cast_inputs: torch.dtype | None,
    enabled: bool,
    args: tuple[torch.Tensor, ...],
) -> None:
    """The oracle is torch's decorator, with a ``forward`` that gets the ``ctx``."""
    functions = make_function_with_setup_context(cast_inputs), make_function(torch.amp, cast_inputs)

    def program(function: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return apply(function, apply(function, a, b), b) @ a

    ours: Any
    ours, expected = (partial(program, function) for function in functions)
    if is_compiled:
        ours = compiled(ours, bare_region=False)
    region = bf16 if enabled else None
    assert_same_bits(run_program(ours, args, region), run_program(expected, args, region))


def test_setup_context_gets_the_inputs_that_forward_got(args: tuple[torch.Tensor, ...]) -> None:
    seen: list[Any] = []
    function = make_function_with_setup_context(f16, seen)

    class Derived(function):  # type: ignore[misc,valid-type]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            function.setup_context(ctx, inputs, output)

    with amp_fx.autocast("cpu", bf16):
        for each in (function, Derived):
            torch.autograd.backward(apply(each, *args).sum())
    assert seen == [(f16, f16, f16)] * 2


def test_setup_context_under_transforms(args: tuple[torch.Tensor, ...]) -> None:
    function, plain = make_function_with_setup_context(None), make_function(amp_fx, None)
    a, b = (arg.detach() for arg in args)
    with amp_fx.autocast("cpu", bf16):
        actual = torch.func.grad(lambda a: apply(function, a, b).float().sum())(a)
        batched = torch.func.vmap(lambda a: apply(function, a, b))(a[None])
        leaf = a.clone().requires_grad_()
        expected = torch.autograd.grad(apply(plain, leaf, b).float().sum(), leaf)[0]
        assert torch.equal(actual, expected)
        assert torch.equal(batched[0], apply(plain, a, b))


@pytest.mark.parametrize("decorator", [amp_fx.custom_fwd, amp_fx.custom_bwd])
def test_bad_input(decorator: Any) -> None:
    with pytest.raises(RegionError, match="cannot autocast"):
        decorator(device_type="nowhere")
    with pytest.raises(RegionError, match="without an index"):
        decorator(device_type="cpu:0")
    with pytest.raises(TypeError, match="can only decorate a function, got 3"):
        decorator(3, device_type="cpu")
    with pytest.raises(TypeError):
        decorator(lambda: None)


@pytest.mark.parametrize("cast_inputs", ["float16", torch.int8, 3])
def test_cast_inputs_that_is_no_floating_dtype(cast_inputs: Any) -> None:
    with pytest.raises(OptionError, match="must be a floating-point dtype"):
        amp_fx.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)


def without_decorators(cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:  # noqa: ARG001
    """Returns the product as an undecorated function, whose backward takes one dtype only."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return 2 * (grad @ b.t()), 2 * (a.t() @ grad)

    return Bare


BARE = {
    "amp": lambda: make_function(torch.amp, f32),
    "ours": lambda: make_function(amp_fx, f32),
    "without cast_inputs": lambda: make_function(torch.amp, None),
    "undecorated": lambda: without_decorators(None),
}


@pytest.mark.parametrize(
    ("name", "way", "compiler"),
    [
        *((name, "plain", "eager") for name in BARE),
        ("amp", "plain", "aot_eager"),
        ("undecorated", "checkpoint", "eager"),
        ("undecorated", "disabled", "eager"),
    ],
)
def test_bare_backend_gives_a_function_what_the_program_gave_it(
    name: str, way: str, compiler: str, args: tuple[torch.Tensor, ...]
) -> None:
    """Eager autocast gives float32 to a function with ``cast_inputs=torch.float32``."""

    def program(function: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        low = a @ b
        if way == "disabled":
            with torch.autocast("cpu", enabled=False):
                return apply(function, low, b) @ b.float()
        if way == "checkpoint":
            called: Any = checkpoint(partial(apply, function), low, b, use_reentrant=False)
            checkpointed: torch.Tensor = called @ b
            return checkpointed
        return apply(function, low, b) @ b

    def eager(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return program(make_function(torch.amp, f32) if way != "disabled" else InFull, a, b)

    class InFull(BARE["undecorated"]()):  # type: ignore[misc]
        @classmethod
        def apply(cls, a: torch.Tensor, b: torch.Tensor) -> Any:
            return super().apply(a.float(), b)

    function = BARE[name]()
    ours = run_program(compiled(partial(program, function), compiler=compiler), args)
    expected = run_program(lambda *a: eager(*a).float(), args, bf16)
    assert_same_bits(ours, expected)


def test_a_function_inside_a_region_of_the_program_runs_as_in_eager_code(
    args: tuple[torch.Tensor, ...],
) -> None:
    function = make_function(torch.amp, None)

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", f16):
            return apply(function, a @ b, b)

    eager = run_program(program, args)
    assert eager.outputs[0].dtype == f16
    assert_same_bits(run_program(compiled(program), args), eager)

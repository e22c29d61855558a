"""bfloat16x3: products of bfloat16 terms as accurate as float32, against float64."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import amp_fx
from amp_fx import Policy
from amp_fx.errors import PolicyError
from amp_fx.policies.float32_products import product_of_terms, terms
from tests.needs import CPP_COMPILER

if TYPE_CHECKING:
    from collections.abc import Callable

X3 = "bfloat16x3"
TINY = 2.0**-125
"""The first terms of numbers below it have fewer than eight bits."""


def unit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A bfloat16 unit: takes bfloat16, sums in float32."""
    assert a.dtype == b.dtype == torch.bfloat16
    return a.float() @ b.float()


def check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compares with a float64 product, within a float32 sum's rounding in any order."""
    exact = a.double() @ b.double()
    finite_a, finite_b = (x.abs().double().nan_to_num(0, 0, 0) for x in (a, b))
    size = finite_a @ finite_b
    is_checked = size < 3.4e38  # beyond, float32 may overflow on the way
    found, exact, size = found.double()[is_checked], exact[is_checked], size[is_checked]
    # Numbers below TINY, and results, are exact to few units of float32's smallest number.
    of_tiny = (finite_a < TINY).double() @ finite_b + finite_a @ (finite_b < TINY).double()
    inner = a.shape[-1] + 4
    bound = inner * 2**-24 * size + 2**-147 * (of_tiny[is_checked] + inner)
    is_near = (found - exact).abs() <= bound
    assert (is_near | torch.isclose(found, exact, rtol=0, atol=0, equal_nan=True)).all()


@settings(max_examples=1000, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 70),
    columns=st.integers(1, 9),
    exponents=st.tuples(st.integers(-140, 120), st.integers(-140, 120)),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 2),
    special=st.floats(width=32),
    seed=st.integers(0, 2**31),
)
def test_any_shape_scale_and_number(
    rows: int,
    inner: int,
    columns: int,
    exponents: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    special: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        (torch.randn(*shape, generator=generator) * 2.0**exponent).to(dtype)
        for shape, exponent, dtype in zip(
            ((rows, inner), (inner, columns)), exponents, dtypes, strict=True
        )
    )
    check(product_of_terms(a, b, unit), a, b)
    a[0, 0], b[-1, -1] = special, 0.0
    check(product_of_terms(a, b, unit), a, b)


ENDS = (
    0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    2.0**-149,
    -(2.0**-140),
    2.0**-126,
    1.0,
    -1e10,
    torch.finfo(torch.float32).max,
    -3.3999e38,
    1.9999999 * 2.0**63,
)


def test_all_pairs_of_numbers_at_the_ends() -> None:
    a, b = torch.tensor(ENDS).reshape(-1, 1), torch.tensor(ENDS).reshape(1, -1)
    found = product_of_terms(a, b, unit)
    check(found, a, b)
    expected = a.double() @ b.double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.float().isinf())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_terms_add_up_exactly(numbers: list[float]) -> None:
    x = torch.tensor(numbers)[None]
    first, second, third = (term.double() for term in terms(x))
    assert torch.equal(2 * (first + second * 2**-8 + third * 2**-17), x.double())


@pytest.mark.parametrize("inner", [1, 4, 64, 1024])
def test_errors_are_no_larger_than_those_of_float32(inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((256, inner), (inner, 256)))
    exact = a.double() @ b.double()
    ours, theirs = (
        (found.double() - exact).square().mean().sqrt()
        for found in (product_of_terms(a, b, unit), a @ b)
    )
    assert ours <= 1.05 * theirs


WAYS: dict[str, Callable[[Policy], Policy]] = {
    "ops": lambda p: p.with_ops({"linear": X3}),
    "modules": lambda p: p.with_modules({nn.Linear: X3}),
    "args": lambda p: p.with_args("linear", {"input": X3, "weight": X3}),
    "file": lambda p: Policy.from_dict(p.with_ops({"linear": X3}).to_dict()),
}


@pytest.mark.parametrize(
    ("way", "compiler"),
    [
        *((way, compiler) for way in WAYS for compiler in ("eager", None)),
        pytest.param("ops", "inductor", marks=CPP_COMPILER),
    ],
)
def test_results_and_gradients_are_those_of_float32(way: str, compiler: str | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 16), torch.randn(8, 64, requires_grad=True)
    policy = WAYS[way](Policy.default())
    call: Callable[..., Any]
    if compiler is None:
        call = amp_fx.autocast("cpu", torch.bfloat16, policy=policy)(model)
    else:
        call = amp_fx.compile(model, policy=policy, options={"compiler": compiler})
    y = call(x)
    assert y.dtype == torch.float32
    exact = model.double()(x.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-6)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(exact, [*model.parameters()], grad.double())
    model.float()
    found = torch.autograd.grad(call(x), [*model.parameters()], grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("args", [{"weight": X3}, {"input": X3, "weight": "float8"}])
def test_one_operand_alone_is_refused(args: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match="for input and weight and no other argument"):
        Policy.default().with_args("linear", args)


def test_explain_names_it() -> None:
    found = amp_fx.explain(nn.Linear(8, 8), policy=Policy.default().with_ops({"linear": X3}))
    [node] = [n for n in found(torch.randn(2, 8)).graphs[0].nodes if "product" in n.op]
    assert node.dtype == "float32"  # a CPU has no kernel that gives float32
    assert "three bfloat16 terms" in node.reason


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda a: f(a, a).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x, x), (x, x.sin()))[1],
    "hessian": lambda f, x: torch.func.hessian(lambda a: f(a, a).square().sum())(x),
    "forward twice": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(lambda a: f(a, a)))(x),
    "backward twice": lambda f, x: torch.func.jacrev(torch.func.jacrev(lambda a: f(a, a)))(x),
    "per sample": lambda f, x: torch.func.vmap(torch.func.grad(lambda a: f(a, a).sum()))(x[None]),
    "of a batch": lambda f, x: torch.func.jvp(
        lambda a: torch.func.vmap(f)(a[None], a[None]), (x,), (x,)
    )[1],
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")  # torch's own, of forward-mode derivatives
@pytest.mark.parametrize("policy", [X3, "lower_precision_wide"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_differentiate_it(transform: str, policy: str) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    with amp_fx.autocast("cpu", torch.bfloat16, policy=Policy.default().with_ops({"mm": policy})):
        found = TRANSFORMS[transform](torch.mm, x)
    expected = TRANSFORMS[transform](torch.mm, x)
    assert found.dtype == torch.float32
    tolerance = 1e-5 if policy == X3 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
def test_gradients_outside_of_a_transform() -> None:
    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)

    def grad_of(multiply: Callable[..., Any]) -> torch.Tensor:
        y, tangent = torch.func.jvp(lambda a: multiply(a, w), (x,), (x,))  # type: ignore[misc]
        return torch.autograd.grad(y.sum() + tangent.square().sum(), w)[0]

    product = functools.partial(torch.ops.amp_fx.float32_product, low_dtype=None)
    torch.testing.assert_close(grad_of(product), grad_of(torch.mm))

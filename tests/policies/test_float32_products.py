"""lower_precision_wide: products of low inputs with a float32 result, against float64."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import Policy
from tests.needs import CPP_COMPILER
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

LOW, WIDE = torch.bfloat16, "lower_precision_wide"


def rounded(tensor: torch.Tensor, dtype: torch.dtype = LOW) -> torch.Tensor:
    """Returns the tensor that a low product would get, in float64."""
    return tensor.detach().to(dtype).double()


def check_sum(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compares with a float64 product, within the rounding of a float32 sum in any order."""
    assert found.dtype == torch.float32
    bound = (a.shape[-1] + 2) * 2**-24 * (a.abs() @ b.abs()) + 2e-38
    assert ((found.double() - a @ b).abs() <= bound).all()


class Layer(nn.Module):
    """Something low, and a product whose result is wanted in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.gate = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.gate(self.before(x))
        return y


ROUTER = Policy.default().with_modules({"gate": WIDE})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compiler", "shape"),
    [
        ("eager", (5, 24)),
        *(("aot_eager", shape) for shape in [(5, 24), (2, 3, 24), (24,)]),
        pytest.param("inductor", (5, 24), marks=CPP_COMPILER),
    ],
    ids=str,
)
def test_result_and_gradients_are_those_of_rounded_inputs(
    compiler: str, shape: tuple[int, ...]
) -> None:
    model, x = Layer(), torch.randn(*shape, requires_grad=True)
    hidden: list[torch.Tensor] = []
    model.before.register_forward_hook(lambda *args: hidden.append(args[2].detach()))
    call = amp_fx.compile(model, policy=ROUTER, options={"compiler": compiler})
    y = call(x)
    with torch.autocast("cpu", LOW):
        low = rounded(model.before(x)).reshape(-1, 32)
    flat = y.detach().reshape(-1, 8) - model.gate.bias.detach()
    weight = rounded(model.gate.weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(flat.double(), low @ weight.T, rtol=0, atol=3e-6)
    assert (flat.double() - low @ weight.T).abs().max() < 1e-2 * (
        (low @ weight.T).to(LOW).double() - low @ weight.T
    ).abs().max().clamp(min=1e-3)

    grad = torch.randn_like(y)
    y.backward(grad)
    low_grad = rounded(grad).reshape(-1, 8)
    assert model.gate.weight.grad is not None
    check_sum(model.gate.weight.grad, low_grad.T, low)
    bias_grad = model.gate.bias.grad
    assert bias_grad is not None
    expected = grad.double().reshape(-1, 8).sum(0)
    torch.testing.assert_close(bias_grad.double(), expected, rtol=1e-5, atol=1e-6)

    trained = y.detach()
    with torch.no_grad():
        torch.testing.assert_close(call(x), trained, rtol=0, atol=2e-6)
        model.gate.weight.mul_(2)
        doubled = call(x) - model.gate.bias
        torch.testing.assert_close(doubled, 2 * (trained - model.gate.bias), rtol=0, atol=4e-6)


def in_region(op: str, dtype: torch.dtype = LOW) -> Callable[..., Any]:
    """Compiles functions of torch, and calls them in a region in which an op is wide."""

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        def program(*args: torch.Tensor) -> Any:
            return function(*args)

        region = amp_fx.autocast("cpu", dtype, policy=Policy.default().with_ops({op: WIDE}))
        result: Callable[..., Any] = region(compiled(program))
        return result

    return call


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")
OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(3, 4), (4, 5)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "addmm": (functools.partial(torch.addmm, alpha=2, beta=3), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "matmul": (torch.matmul, [(2, 1, 3, 4), (5, 4, 6)]),
    "vectors": (torch.matmul, [(4,), (4,)]),
    "vector and matrix": (torch.matmul, [(4,), (4, 5)]),
    "matrix and vector": (torch.matmul, [(3, 4), (4,)]),
    "matrices and vector": (torch.matmul, [(2, 3, 4), (4,)]),
    "vector and matrices": (torch.matmul, [(4,), (2, 4, 5)]),
}


@pytest.mark.parametrize(("function", "shapes"), OPS.values(), ids=OPS)
def test_every_product(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    args = [torch.randn(*shape) for shape in shapes]
    policy = Policy.default().with_ops(dict.fromkeys(PRODUCTS, WIDE))
    call = amp_fx.compile(function, policy=policy, options={"compiler": "aot_eager"})
    found = call(*args)
    factors = [rounded(arg) for arg in args[-2:]]
    expected = function(*[arg.double() for arg in args[:-2]], *factors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", [WIDE, "float8"])
@pytest.mark.filterwarnings("ignore:float8 products on the CPU")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
def test_a_checkpoint_in_a_compiled_step_with_its_backward(policy: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    x = torch.randn(16, 32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with amp_fx.autocast("cpu", LOW, policy=Policy.default().with_ops({"linear": policy})):
            y: torch.Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    def step(x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        y.float().sum().backward()  # type: ignore[no-untyped-call]
        return y.detach()

    expected = compiled(forward)(x)
    expected.float().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    found = compiled(step)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=2e-2, atol=2e-2)


def test_beta_zero_ignores_what_is_added() -> None:
    add = in_region("addmm")(functools.partial(torch.addmm, beta=0))
    found = add(torch.full((2,), torch.nan), torch.ones(2, 2), torch.eye(2))
    assert (found == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 70),
    columns=st.integers(1, 9),
    exponents=st.tuples(st.integers(-60, 30), st.integers(-60, 30)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    is_low=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_one_rounding_of_the_sum_at_all_scales(
    rows: int,
    inner: int,
    columns: int,
    exponents: tuple[int, int],
    dtype: torch.dtype,
    is_low: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float16:  # within its range, subnormal numbers included
        exponents = (exponents[0] % 30 - 20, exponents[1] % 30 - 20)
    a, b = (
        torch.randn(*shape, generator=generator) * 2.0**exponent
        for shape, exponent in zip(((rows, inner), (inner, columns)), exponents, strict=True)
    )
    given_a = a.to(dtype) if is_low else a
    found = torch.ops.amp_fx.float32_product(given_a, b, dtype)
    check_sum(found, rounded(a, dtype), rounded(b, dtype))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0, 3e38])
def test_numbers_at_the_ends(value: float) -> None:
    a = torch.tensor([[value, 1.0]])
    found = in_region("mm")(torch.mm)(a, torch.eye(2))
    expected = (a.to(LOW).float() @ torch.eye(2)).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_presets_name_routers_and_heads() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 4), "gate_proj": nn.Linear(8, 8)})
            self.lm_head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.mlp["gate"](x), self.mlp["gate_proj"](x), self.lm_head(x)

    x = torch.randn(2, 8)
    for name, expected in (
        ("router", (torch.float32, LOW, LOW)),
        ("head", (LOW, LOW, torch.float32)),
    ):
        with torch.autocast("cpu", LOW):
            results = compiled(Block(), policy=name)(x)
        assert tuple(y.dtype for y in results) == expected
        found = amp_fx.explain(Block(), policy=name)(x)
        assert f"policy {name!r}\n" in str(found)


def test_other_ops_of_a_module_follow_the_tables() -> None:
    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x, -1)

    policy = Policy.default().with_modules({Scores: WIDE})
    found = amp_fx.explain(Scores(), policy=policy)(torch.randn(4, 4))
    reasons = {node.op: node.reason for graph in found.graphs for node in graph.nodes}
    product = next(reason for op, reason in reasons.items() if "float32_product" in op)
    softmax = next(reason for op, reason in reasons.items() if "softmax" in op)
    assert "gives float32" in product
    assert "gives float32" not in softmax


def test_float64_and_integers_are_left_alone() -> None:
    product = in_region("mm")(torch.mm)
    assert product(torch.eye(2).double(), torch.eye(2).double()).dtype == torch.float64
    assert product(torch.eye(2).long(), torch.eye(2).long()).dtype == torch.int64


@pytest.mark.parametrize("shapes", [((2, 4, 0), (0, 3)), ((0, 4), (4, 3)), ((2, 0, 4), (2, 4, 3))])
def test_empty_factors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    found = in_region("matmul")(torch.matmul)(torch.randn(shapes[0]), torch.randn(shapes[1]))
    assert found.dtype == torch.float32
    assert found.shape == torch.matmul(torch.zeros(shapes[0]), torch.zeros(shapes[1])).shape

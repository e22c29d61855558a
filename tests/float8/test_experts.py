"""Products with a weight per expert in float8: the bits of torchao's grouped product."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import Policy
from amp_fx.policies.policy import preset
from amp_fx.weights.engine import is_available
from tests.float8.experts import kernel_for_cpu, quantize_without_triton, torchaos
from tests.float8.test_keep import count_float8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
pytestmark = pytest.mark.filterwarnings("ignore")

POLICY = preset("float8-rowwise").with_ops({"_grouped_mm": "float8"})
NUM_EXPERTS, SIZE, WIDTH = 4, 32, 48
UPDATES, BATCHES = 3, 2


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    quantize_without_triton(monkeypatch)
    torch.manual_seed(0)
    with kernel_for_cpu():
        yield


class Experts(nn.Module):
    """An MLP per expert, of rows that are sorted by experts."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, SIZE).to(dtype))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, SIZE, WIDTH).to(dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.product(nn.functional.silu(self.product(x, self.up, ends)), self.down, ends)

    def product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.mT, offs=ends)


class Torchaos(Experts):
    """The same with torchao's product, which wants groups of 16, 32, ... rows."""

    def product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torchaos(x.to(torch.bfloat16), weight, ends)


class Batched(Experts):
    """As many rows for each expert, by one of the ops for that.

    Weights may lie as ``[experts, inputs, outputs]``.
    """

    def __init__(self, op: str, *, is_turned: bool = False) -> None:
        super().__init__(torch.float32)
        self.op, self.is_turned = op, is_turned
        if is_turned:
            self.up, self.down = (nn.Parameter(p.mT.contiguous()) for p in self.parameters())

    def product(self, x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        weight = weight if self.is_turned else weight.mT
        if self.op == "baddbmm":
            return torch.baddbmm(x.new_zeros(1), x, weight)
        product: Tensor = getattr(torch, self.op)(x, weight)
        return product


def called(
    model: Callable[..., Tensor], how: str, policy: Any = POLICY, *, cache: Any = "training"
) -> Callable[..., Tensor]:
    """A model by one of the ways to use a policy."""
    torch._dynamo.reset()
    if how == "region":

        def call(*inputs: Tensor) -> Tensor:
            with amp_fx.autocast("cpu", policy=policy):
                y: Tensor = model(*inputs)
            return y

        return call
    options: dict[str, Any] = {"policy": policy, "compiler": how, "fallback": False}
    options |= {"output_dtype": "autocast", "weight_cache": cache}
    compiled: Callable[..., Tensor] = torch.compile(model, backend="amp_fx", options=options)
    return compiled


def trained(model: nn.Module, call: Callable[..., Tensor], ends: Tensor) -> list[Tensor]:
    """Outputs, gradients and weights of some updates of some micro-batches."""
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(UPDATES):
        for _ in range(BATCHES):
            x = torch.randn(int(ends[-1]), SIZE).bfloat16().requires_grad_()
            y = call(x, ends)
            y.float().square().mean().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            found += [y.detach(), x.grad]
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach() for p in model.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    pairs = enumerate(zip(found, expected, strict=True))
    assert [i for i, (a, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)] == []


@pytest.mark.parametrize("how", ["eager", "aot_eager", "region"])
def test_bits_of_torchao(how: str) -> None:
    ends = torch.tensor([16, 32, 64, 96], dtype=torch.int32)
    model, other = Experts(), Torchaos()
    assert_equal(trained(model, called(model, how), ends), trained(other, other, ends))


@pytest.mark.parametrize("how", ["aot_eager", "region"])
def test_groups_of_any_number_of_rows(how: str) -> None:
    """As torchao's product of groups that are filled up; rows behind the last belong to nobody."""
    sizes, rows = [3, 0, 37, 50], 96
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    model, other, used = Experts(), Torchaos(), int(ends[-1])
    x = torch.randn(rows, SIZE).bfloat16()
    y = called(model, how)(x, ends)[:used]
    y.float().square().mean().backward()  # type: ignore[no-untyped-call]
    filled: list[Tensor] = []
    places: list[int] = []
    start = 0
    for size in sizes:
        begin = sum(len(own) for own in filled)
        places += range(begin, begin + size)
        zeros = x.new_zeros(-size % 16 if size else 16, SIZE)
        filled.append(torch.cat([x[start : start + size], zeros]))
        start += size
    new_ends = torch.tensor([len(part) for part in filled]).cumsum(0).to(torch.int32)
    expected = other(torch.cat(filled), new_ends)[places]
    expected.float().square().mean().backward()
    assert torch.equal(y, expected)
    assert_equal(gradients(model), gradients(other))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", ["aot_eager", "region"])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("op", ["bmm", "baddbmm", "matmul"])
def test_batched_products(op: str, is_turned: bool, how: str) -> None:
    """Float32 weights are quantized as they are stored."""
    model, other, rows = Batched(op, is_turned=is_turned), Torchaos(torch.float32), 16
    x = torch.randn(NUM_EXPERTS, rows, SIZE)
    ends = torch.arange(1, NUM_EXPERTS + 1, dtype=torch.int32) * rows
    y, expected = called(model, how)(x, ends), other(x.flatten(0, 1), ends)
    for result in (y, expected):
        result.float().square().mean().backward()
    found = [grad.mT if is_turned else grad for grad in gradients(model)]
    assert_equal([y.flatten(0, 1), *found], [expected, *gradients(other)])


@pytest.mark.skipif(not is_available(), reason="nothing is kept without the part in C++")
@pytest.mark.parametrize("has_step", [False, True])
def test_experts_are_quantized_once_per_update(
    has_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[Any] = Counter()
    count_float8(made, monkeypatch)
    model, ends = Batched("bmm"), torch.empty(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step: Any = amp_fx.compile_step(optimizer, backend="eager") if has_step else optimizer.step
    call = called(model, "aot_eager", cache=True if has_step else "training")
    for _ in range(5):
        for _ in range(4):
            y = call(torch.randn(NUM_EXPERTS, 24, SIZE), ends)
            y.float().square().mean().backward()  # type: ignore[no-untyped-call]
        step()
        optimizer.zero_grad()
    # A step hands over what it wrote; the first one is eager. Inputs of ``up`` need no gradient.
    assert sorted(made.values()) == [2 if has_step else 5] * 3
    twin, x = Batched("bmm"), torch.randn(NUM_EXPERTS, 24, SIZE)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(call(x, ends), called(twin, "region")(x, ends))


def test_a_module_of_experts_can_be_named() -> None:
    outer, x = Outer(), torch.randn(NUM_EXPERTS, 16, SIZE)
    policy = Policy.default().with_modules({"experts": "float8"}).with_float8("rowwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_fx.errors.PolicyWarning)
        y = called(outer, "aot_eager", policy)(x)
    assert torch.equal(y, called(outer.experts, "aot_eager")(x, x))


class Outer(nn.Module):
    """A model that holds experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Batched("bmm")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, x)
        return y


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise-gw-hp"])
def test_other_recipes_stay_low_and_say_so(recipe: str) -> None:
    model, ends = Experts(), torch.tensor([16, 32, 64, 96], dtype=torch.int32)
    policy = preset(f"float8-{recipe}").with_ops({"_grouped_mm": "float8"})
    x = torch.randn(96, SIZE).bfloat16()
    found = amp_fx.explain(model, policy=policy)(x, ends)
    reasons = [n.reason for g in found.graphs for n in g.nodes if n.op == "aten._grouped_mm"]
    said = f"not in float8: products of experts require the recipe rowwise, not {recipe}"
    assert len(reasons) == 2
    assert all(said in reason for reason in reasons)
    assert torch.equal(called(model, "aot_eager", policy)(x, ends), model(x, ends))


@pytest.mark.parametrize("op", ["_grouped_mm", "bmm"])
def test_accuracy_is_that_of_eager_runs(op: str) -> None:
    model = Experts(torch.float32) if op == "_grouped_mm" else Batched(op)
    x, ends = torch.randn(96, SIZE), torch.tensor([3, 3, 64, 96], dtype=torch.int32)
    if isinstance(model, Batched):
        x = x.view(NUM_EXPERTS, -1, SIZE)

    def loss_of(y: Tensor) -> Tensor:
        return y.float().square().mean()

    report = amp_fx.accuracy(model, policy=POLICY, loss=loss_of)(x, ends)
    loss = loss_of(called(model, "region")(x, ends))
    low = torch.autograd.grad(loss, [*model.parameters()])
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    exact = wide(model, loss_of, x, ends)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(low, exact, strict=True)]
    measured = {g.name: g.error for g in report.gradients}
    assert measured == pytest.approx(dict(zip(("up", "down"), errors, strict=True)), rel=1e-2)
    kernels = [n.stage for n in report.nodes if n.kernel == "amp_fx::float8_product"]
    assert kernels.count("forward") == 2
    assert report.not_examined == ()


def wide(model: Experts, loss_of: Any, x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Gradients without rounding, expert by expert."""
    weights = [p.detach().float().requires_grad_() for p in model.parameters()]
    rows = list(x.float()) if x.dim() == 3 else x.float().tensor_split(ends.tolist()[:-1])
    found = []
    for part, up, down in zip(rows, *weights, strict=True):
        found.append(nn.functional.silu(part @ up.mT) @ down.mT)
    return torch.autograd.grad(loss_of(torch.cat(found)), weights)

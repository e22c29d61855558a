"""Weights are quantized once per update, layout and weight, and no write leaves a stale value."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import Policy, weight_cache
from amp_fx.policies.float8 import float8_weight
from amp_fx.tables.float8 import RECIPES
from amp_fx.weights.prepare import CachedValueSpec
from amp_fx.weights.store import STORE
from amp_fx.weights.watch import is_available
from tests.weights import nets, writes
from tests.weights.nets import assert_same, compile_amp_fx, make_net
from tests.weights.writes import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning"),
    pytest.mark.skipif(not is_available(), reason="nothing is kept without the part in C++"),
]

POLICY = Policy.default().with_ops({"linear": "float8"}).with_float8("rowwise")
SIZE = 16
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TURNED = {"transpose_in_place", "data_transposed", "data_transposed_and_written"}


@pytest.fixture(autouse=True)
def _sizes_that_fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (nets, writes):
        monkeypatch.setattr(module, "SIZE", SIZE)
    monkeypatch.setattr(writes, "COUNT", SIZE * SIZE)
    with torch._dynamo.config.patch(recompile_limit=10**3):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Counts how often each float8 tensor was computed, by its weight and its node."""
    counts: Counter[Any] = Counter()
    count_float8(counts, monkeypatch)
    return counts


def count_float8(counts: Counter[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = CachedValueSpec.evaluate

    def counting(spec: CachedValueSpec, weights: Any) -> Any:
        values = evaluate(spec, weights)
        for node, value in zip(spec.outputs, values, strict=True):
            if value.dtype in FLOAT8:
                counts[spec.names, node.name] += 1
        return values

    monkeypatch.setattr(CachedValueSpec, "evaluate", counting)


def _backward(y: torch.Tensor) -> None:
    y.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compiler", "recipe"), [*itertools.product(["aot_eager"], RECIPES), ("inductor", "rowwise")]
)
def test_one_quantization_per_weight_layout_and_update(
    made: Counter[Any], compiler: str, recipe: str
) -> None:
    weight_cache.clear()
    net = make_net()
    compiled = compile_amp_fx(net, policy=POLICY.with_float8(recipe), compiler=compiler)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        for _ in range(4):
            _backward(compiled(torch.randn(16, SIZE)))
        optimizer.step()
        optimizer.zero_grad()
    # The input of the first layer needs no gradient.
    assert sorted(made.items()) == sorted(
        (key, 5) for key in made if key[0] in {("a.weight",), ("b.weight",)}
    )
    assert Counter(name for name, _ in made) == {("a.weight",): 1, ("b.weight",): 2}
    # Nothing else reads the weights: neither graph quantizes them.
    assert {v.dtype for e in STORE.of_weight(net.b.weight) for v in e.value} <= {
        *FLOAT8,
        torch.float32,
    }
    assert not any(e.spec.is_alias for w in net.parameters() for e in STORE.of_weight(w))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fill", [0.0, float("nan")])
@pytest.mark.parametrize("has_rows_of_outputs", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_layouts_have_the_bits_without_the_cache(
    made: Counter[Any], recipe: str, has_rows_of_outputs: bool, fill: float
) -> None:
    """Compares both layouts on the CPU; ``tests/cuda/test_float8.py`` executes code for GPUs."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(48, 32))
    with torch.no_grad():
        weight[3], weight[5, 7] = 0, fill
    product = torch.nn.functional.linear if has_rows_of_outputs else torch.mm
    name = "linear" if has_rows_of_outputs else "mm"
    model = Product(weight, product)
    policy = Policy.default().with_ops({name: "float8"}).with_float8(recipe)
    compiled = compile_amp_fx(model, policy=policy)
    uncached = compile_amp_fx(model, policy=policy, compiler="eager", weight_cache=False)
    x = torch.randn(16, 32 if has_rows_of_outputs else 48)
    found, expected = [], []
    for _ in range(2):  # the second call reads what is cached
        found += with_gradient(compiled, x)
        expected += with_gradient(uncached, x)
    assert_same(found, expected)
    assert made == dict.fromkeys(made, 1)
    assert len(made) == 2


def with_gradient(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach().float(), x.grad]


class Product(torch.nn.Module):
    """A product with one weight."""

    def __init__(self, weight: torch.nn.Parameter, product: Any) -> None:
        super().__init__()
        self.weight = weight
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.product(x, self.weight)
        return y


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("write", sorted({*(names[0] for names in SIGNALS.values()), *TURNED}))
def test_every_signal_of_a_write_is_seen(write: str, compiler: str, is_trained: bool) -> None:
    if compiler == "inductor" and (is_trained or write in TURNED):
        pytest.skip("frozen graphs are without gradients; their code refuses turned weights")
    net, twin = make_net(), make_net()
    steps = [writes.write_called(write)(each) for each in (net, twin)]
    options = {"numerics": "strict"} if compiler == "inductor" else {}
    compiled = compile_amp_fx(net, policy=POLICY, compiler=compiler, **options)
    uncached = compile_amp_fx(twin, policy=POLICY, compiler="eager", weight_cache=False)
    for i in range(3):
        x = torch.randn(16, SIZE).to(next(net.parameters()).dtype)
        with torch.set_grad_enabled(is_trained):
            y = compiled(x)
            expected = uncached(x)
        assert_same(y, expected.to(y.dtype))
        for step in steps:
            step(i)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("compiler", "recipe"),
    [*itertools.product(["aot_eager"], RECIPES), ("eager", "rowwise"), ("inductor", "rowwise")],
)
def test_a_bfloat16_checkpoint_has_the_same_data(
    made: Counter[Any], compiler: str, recipe: str
) -> None:
    """The float8 data of a training engine are those of one that loads its bfloat16 weights."""
    weight_cache.clear()
    policy = POLICY.with_float8(recipe, source="bfloat16")
    net, loaded = make_net(), make_net()
    x = torch.randn(16, SIZE)
    trained = compile_amp_fx(net, policy=policy, compiler=compiler)
    engine = compile_amp_fx(loaded.bfloat16(), policy=POLICY.with_float8(recipe), compiler=compiler)
    for _ in range(2):
        loaded.load_state_dict(net.state_dict())  # rounds to bfloat16
        with torch.no_grad():
            assert torch.equal(trained(x), engine(x).to(torch.float32))
            trained(x)
            net.a.weight.mul_(1.37)
    if compiler == "eager":  # nothing is kept there
        return
    [entry] = STORE.of_weight(net.b.weight)
    data, factors = float8_weight(net.b.weight.bfloat16(), recipe, True, False)
    kept_factors, kept = sorted(entry.value, key=torch.Tensor.numel)
    kept = kept.mT if compiler == "inductor" else kept
    assert torch.equal(kept.view(torch.int8), data.view(torch.int8))
    assert torch.equal(kept_factors.flatten(), factors.flatten())
    assert set(made.values()) <= {1, 2}  # of four calls, with one write in between

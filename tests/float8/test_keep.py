"""Weights are quantized once per update, layout and weight, and no write leaves a stale value."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from amp_fx.weights.kept_float8 import Float8Slot, write_forms

import amp_fx
from amp_fx import Policy, weight_cache
from amp_fx.tables.float8 import RECIPES
from amp_fx.weights import kept_call
from amp_fx.weights.engine import is_available
from amp_fx.weights.store import same_bits
from tests.weights import nets, writes
from tests.weights.nets import assert_same, compile_amp_fx, make_net

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning"),
    pytest.mark.skipif(not is_available(), reason="nothing is kept without the part in C++"),
]

POLICY = Policy.default().with_ops({"linear": "float8"}).with_float8("rowwise")
SIZE = 16
TURNED = {"transpose_in_place", "data_transposed", "data_transposed_and_written"}


@pytest.fixture(autouse=True)
def _sizes_that_fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (nets, writes):
        monkeypatch.setattr(module, "SIZE", SIZE)
    monkeypatch.setattr(writes, "COUNT", SIZE * SIZE)
    monkeypatch.setattr(kept_call, "MOST_UNUSED", 10**6)
    with torch._dynamo.config.patch(recompile_limit=10**3):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each weight was quantized, by layout."""
    counts: Counter[Any] = Counter()
    make = Float8Slot.make

    def counting(slot: Float8Slot, weights: Any) -> Any:
        if not isinstance(weights[0], torch._subclasses.FakeTensor):
            counts[slot.name, slot.is_back] += 1
        return make(slot, weights)

    monkeypatch.setattr(Float8Slot, "make", counting)
    return counts


def _backward(y: torch.Tensor) -> None:
    y.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_one_quantization_per_weight_layout_and_update(made: Counter[Any], compiler: str) -> None:
    net = make_net()
    compiled = compile_amp_fx(net, policy=POLICY, compiler=compiler)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        for _ in range(4):
            _backward(compiled(torch.randn(16, SIZE)))
        optimizer.step()
        optimizer.zero_grad()
    # The input of the first layer needs no gradient.
    assert len({name for name, _ in made}) == 2
    assert sorted(made.values()) == [5, 5, 5]
    assert sum(is_back for _, is_back in made) == 1


@pytest.mark.parametrize("fill", [0.0, float("nan")])
@pytest.mark.parametrize("has_rows_of_outputs", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_layouts_at_once_have_the_bits_of_each(
    recipe: str, has_rows_of_outputs: bool, fill: float
) -> None:
    """As GPUs make them; ``tests/cuda/test_float8.py`` executes their code."""
    torch.manual_seed(0)
    weight = torch.randn(48, 32)
    weight[3], weight[5, 7] = 0, fill
    slots = [Float8Slot(0, recipe, has_rows_of_outputs, is_back) for is_back in (True, False)]
    values = [slot.empty(weight) for slot in slots]
    write_forms([(weight, s.how, v) for s, v in zip(slots, values, strict=True)])
    for slot, value in zip(slots, values, strict=True):
        for found, expected in zip(value, slot.make((weight,)), strict=True):
            assert found.stride() == expected.stride()
            assert same_bits(found, expected)


def test_inference_shares_what_training_keeps(made: Counter[Any]) -> None:
    net = make_net()
    compiled = compile_amp_fx(net, policy=POLICY, compiler="aot_eager")
    x = torch.randn(16, SIZE)
    _backward(compiled(x))
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    assert sorted(made.values()) == [1, 1, 1]


def test_bytes_are_counted() -> None:
    weight_cache.clear()
    net = make_net()
    compiled = compile_amp_fx(net, policy=POLICY)
    with torch.no_grad():
        compiled(torch.randn(16, SIZE))
    assert weight_cache.stats().bytes >= 2 * (SIZE * SIZE + 4 * SIZE)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("write", sorted({**writes.WRITES, **writes.HARD_WRITES}))
def test_every_write_is_seen(write: str, compiler: str, is_trained: bool) -> None:
    if compiler == "inductor" and (is_trained or write in TURNED):
        pytest.skip("frozen graphs are without gradients; their code refuses turned weights")
    net, twin = make_net(), make_net()
    steps = [writes.write_called(write)(each) for each in (net, twin)]
    options = {"numerics": "strict"} if compiler == "inductor" else {}
    compiled = compile_amp_fx(net, policy=POLICY, compiler=compiler, **options)
    for i in range(3):
        x = torch.randn(16, SIZE).to(next(net.parameters()).dtype)
        with torch.set_grad_enabled(is_trained):
            y = compiled(x)
            with amp_fx.autocast("cpu", policy=POLICY):
                expected = twin(x)
        assert_same(y, expected.to(y.dtype))
        for step in steps:
            step(i)

"""``compile_step`` writes weights quantized to float8 along with the weights."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from amp_fx import Policy
from amp_fx.tables.float8 import RECIPES
from amp_fx.weights import step_copies
from amp_fx.weights.engine import is_available
from amp_fx.weights.entry import computing_values
from amp_fx.weights.store import STORE
from tests.float8.test_keep import count_float8
from tests.weights import writes
from tests.weights.nets import assert_same

if TYPE_CHECKING:
    from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning"),
    pytest.mark.skipif(not is_available(), reason="nothing is kept without the part in C++"),
]

UPDATES, BATCHES = 5, 4
WRITTEN_BY_CALLS = 2
"""How often calls quantize a weight: before the first update, and after it.

The first update runs eagerly, to make the optimizer's state.
"""


def three() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((16, 48), (48, 32), (32, 16))
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in sizes])


def policy(recipe: str) -> Policy:
    return Policy.default().with_ops({"linear": "float8"}).with_float8(recipe)


def trained(recipe: str, backend: str) -> list[torch.Tensor]:
    """Outputs and weights of some updates of some micro-batches each."""
    torch._dynamo.reset()
    model = three()
    options: dict[str, Any] = {"policy": policy(recipe), "compiler": "aot_eager"}
    compiled: Any = torch.compile(model, backend="amp_fx", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = amp_fx.compile_step(optimizer, max_norm=1.0, backend=backend)
    found = []
    for _ in range(UPDATES):
        for _ in range(BATCHES):
            y = compiled(torch.randn(16, 16))
            y.square().mean().backward()
            found.append(y.detach())
        step()
        optimizer.zero_grad()
    return found + [p.detach() for p in model.parameters()]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("backend", "recipe"), [*itertools.product(["eager"], RECIPES), ("inductor", "rowwise")]
)
def test_calls_quantize_only_what_steps_do_not_write(
    recipe: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[Any] = Counter()
    count_float8(made, monkeypatch)
    found = trained(recipe, backend)
    # The input of the first layer needs no gradient.
    assert sorted(made.values()) == [WRITTEN_BY_CALLS] * 5

    monkeypatch.setattr(step_copies, "is_available", lambda: False)  # the next call makes all anew
    made.clear()
    assert_same(found, trained(recipe, backend))
    assert set(made.values()) == {UPDATES}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_layouts_are_written_with_the_bits_of_a_call(recipe: str) -> None:
    model = three()
    options: dict[str, Any] = {"policy": policy(recipe), "compiler": "aot_eager"}
    compiled: Any = torch.compile(model, backend="amp_fx", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp_fx.compile_step(optimizer)
    for _ in range(3):
        compiled(torch.randn(16, 16)).square().mean().backward()
        step()
    found = 0
    for weight in model.parameters():
        for entry in STORE.of_weight(weight):
            assert entry.is_fresh()
            with computing_values():
                assert_same(entry.value, entry.spec.make((weight.detach(),)))
            found += not getattr(entry.spec, "is_cast", False)
    assert found == NUM_VALUES[recipe]


NUM_VALUES = {"tensorwise": 3, "rowwise": 5, "rowwise-gw-hp": 5}
"""Two layouts of three weights, but for the first; one scale serves both."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", ["data_mul_", "data_transposed", "foreach_copy_"])
def test_writes_behind_a_step_are_seen(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.weights import nets

    for module in (nets, writes):
        monkeypatch.setattr(module, "SIZE", 16)
    monkeypatch.setattr(writes, "COUNT", 16 * 16)
    net, twin = nets.make_net(), nets.make_net()
    compiled = nets.compile_amp_fx(net, policy=policy("rowwise"), compiler="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = amp_fx.compile_step(optimizer, backend="eager")
    change = writes.write_called(write)(net)
    for i in range(3):
        x = torch.randn(16, 16)
        y = compiled(x)
        with torch.no_grad(), amp_fx.autocast("cpu", policy=policy("rowwise")):
            assert_same(y.detach(), twin(x).to(y.dtype))
        loss: Any = y.square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        change(i)
        with torch.no_grad():
            for theirs, ours in zip(twin.parameters(), net.parameters(), strict=True):
                theirs.copy_(ours)

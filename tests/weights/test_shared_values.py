"""Several graphs of one model share the cached values of its weights."""

from __future__ import annotations

import functools
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights.cpu.few_rows import MAX_ROWS
from tests import needs
from tests.weights.nets import random, twin_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler"),
    pytest.mark.usefixtures("_low_products"),  # packed low on any CPU
]

SIZE = 64
LOW_BYTES = 2 * (2 * SIZE * SIZE + SIZE)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE, bias=False))


def compiled_of(model: Any, **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, **options}
    return torch.compile(model, backend="amp_fx", options=options, dynamic=False)


def check(compiled: Any, twin: nn.Module, batch: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Inductor multiplies by one row in another way: to bfloat16's rounding."""
    x = random(batch, SIZE, seed=batch)
    with torch.autocast("cpu", dtype):
        expected = twin(x).float()
    torch.testing.assert_close(compiled(x), expected, rtol=0.02, atol=0.02)


def kept() -> tuple[int, int]:
    """Bytes, and how many values were made so far."""
    stats = weight_cache.stats()
    return stats.bytes, stats.refreshes


def test_after_a_write_no_graph_is_stale() -> None:
    """Packed weights of two batch sizes are two values; no more than these are cached."""
    model = make_net()
    twin, compiled = twin_of(model), compiled_of(model)
    nets: Any = (model, twin)
    for step in range(3):
        for batch in (4, 6)[:: 1 if step % 2 else -1]:
            check(compiled, twin, batch)
            check(compiled, twin, batch)
            assert kept()[0] <= 2 * LOW_BYTES
        for net in nets:
            net[2].weight.data.mul_(-1.5)
    check(compiled, twin, 6)
    assert kept()[0] <= 2 * LOW_BYTES


@needs.FROZEN_GRAPHS
@needs.PACKING
def test_what_needs_no_packing_is_made_once() -> None:
    """Few rows and many have other kernels, whose weights have other layouts."""
    model = make_net()
    compiled = compiled_of(model)
    compiled(random(4, SIZE))
    before = kept()[1]
    compiled(random(2 * MAX_ROWS, SIZE))
    assert kept()[1] - before == 2, "two weights were packed, the bias was not cast again"


def test_another_dtype_is_another_value() -> None:
    model = make_net()
    twin = twin_of(model)
    low, half = compiled_of(model), compiled_of(model, dtype=torch.float16)
    nets: Any = (model, twin)
    for net in nets:
        net[0].weight.data.add_(1e-3)  # which bfloat16 rounds away, and float16 does not
    check(low, twin, 4)
    check(half, twin, 4, torch.float16)
    assert kept()[0] == 2 * LOW_BYTES


def test_models_share_nothing() -> None:
    models = [make_net() for _ in range(2)]
    for model in models:
        compiled_of(model)(random(4, SIZE))
    assert kept()[0] == 2 * LOW_BYTES


@needs.FROZEN_GRAPHS
def test_values_go_with_the_graphs() -> None:
    model = make_net()
    for program in (first, second):
        compiled_of(functools.partial(program, model))(random(4, SIZE))
    assert kept()[0] == LOW_BYTES
    torch._dynamo.reset()
    gc.collect()
    assert kept()[0] == 0


def first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out


def second(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out + 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = self.weight * torch.tril(torch.ones(SIZE, SIZE))
        return functional.linear(torch.relu(functional.linear(x, masked)), self.weight)


def test_values_of_the_same_weight_are_told_apart() -> None:
    model = Tied()
    twin, compiled = twin_of(model), compiled_of(model)
    for step in range(3):
        for batch in (4, 6):
            x = random(batch, SIZE)
            with torch.autocast("cpu", torch.bfloat16):
                expected = twin(x).float()
            torch.testing.assert_close(compiled(x), expected, rtol=0.04, atol=0.5)
        for net in (model, twin):
            torch._foreach_mul_([net.weight.data], 0.5 + step)


def test_threads_that_call_graphs_of_one_model_while_it_is_written() -> None:
    """Each result is that of one of the states that the weight went through."""
    model = nn.Linear(SIZE, SIZE, bias=False)
    compiled = compiled_of(model)
    batches = {size: torch.ones(size, SIZE) for size in (4, 6)}
    model.weight.data.fill_(1.0)
    for x in batches.values():
        compiled(x)
    wrong: list[Any] = []

    @torch.no_grad()
    def call(size: int) -> None:
        for _ in range(60):
            out = compiled(batches[size])
            if not bool((out == out[0, 0]).all()) or float(out[0, 0]) % SIZE:
                wrong.append(out)

    threads = [threading.Thread(target=call, args=(size,)) for size in batches]
    for thread in threads:
        thread.start()
    for value in range(2, 30):
        model.weight.data = torch.full((SIZE, SIZE), float(value))
    for thread in threads:
        thread.join()
    assert not wrong
    for x in batches.values():
        assert bool((compiled(x) == 29.0 * SIZE).all())

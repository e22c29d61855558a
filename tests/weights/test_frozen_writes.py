"""Frozen graphs recompute cached values after writes (``test_cached_values``)."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from amp_fx import weight_cache
from amp_fx.backend import lower
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights import cache_entry, store
from amp_fx.weights.prepare import run_node
from amp_fx.weights.store import STORE
from amp_fx.weights.watch import is_available
from tests import needs
from tests.weights.nets import FROZEN, compile_amp_fx, inputs, make_net, random, twin_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")


# ---------------------------------------------------------------- all that is made of weights


class Attention(nn.Module):
    """Projections that are multiplied as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.q(x)) + torch.relu(self.k(x)) * torch.relu(self.v(x))


class Small(nn.Module):
    """Numbers that inductor would write into its code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, Any]]] = {
    "attention": (Attention, lambda: random(5, 32), {"cpp.enable_concat_linear": True}),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
        lambda: random(2, 16),
        {},
    ),
    "small": (Small, lambda: random(2, 3), {}),
    "convolutions": (convolutions, lambda: random(2, 4, 6, 6), {}),
    "folded batch norm": (convolutions, lambda: random(2, 4, 6, 6), {"fold_batch_norm": True}),
    "lstm cell": (lambda: nn.LSTMCell(8, 8), lambda: random(2, 8), {}),
}


def changed(model: nn.Module, seed: int) -> None:
    """Other contents for all parameters and buffers, in different ways."""
    for i, tensor in enumerate([*model.parameters(), *model.buffers()]):
        if tensor.is_floating_point():
            new = random(tensor.numel(), seed=100 * seed + i).abs().view(tensor.shape) + 0.1
            if (i + seed) % 2:
                tensor.data.copy_(new)
            else:
                torch._foreach_copy_([tensor], [new])


def is_packed() -> bool:
    """Returns True if any value is a constant of generated code."""
    calls = [call for entry in STORE.entries.values() for call in entry.calls]
    return any(call._bind is not None for call in calls)


@pytest.mark.one_in(3)
@needs.FROZEN_GRAPHS
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_whatever_is_made_of_weights_is_made_again(name: str) -> None:
    """Calls are right after each of three writes of all weights, and find kept values."""
    build, make_input, options = MODELS[name]
    model, x = build().eval(), make_input()
    twin = twin_of(model)
    compiled = FROZEN.compile(model, fallback=False, **options)
    for seed in range(3):
        changed(model, seed)
        changed(twin, seed)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                expected = torch.utils._pytree.tree_map(torch.Tensor.float, twin(x))
            actual = torch.utils._pytree.tree_map(torch.Tensor.float, compiled(x))
            # Fused epilogues and folded norms round once less.
            torch.testing.assert_close(actual, expected, rtol=0.04, atol=0.04)
    found = list(STORE.entries.values())
    assert found, "nothing is frozen"
    assert all(entry.slot.hits >= 3 for entry in found), "each is found fresh after each write"


@needs.FROZEN_GRAPHS
@torch.no_grad()
def test_statistics_that_a_call_writes_are_not_frozen() -> None:
    """Caches no values of running means, which would be refreshed in each call."""
    model, x = convolutions().train(), random(2, 4, 6, 6)
    twin, compiled = twin_of(model), FROZEN.compile(model, fallback=False)
    compiled(x)
    before = weight_cache.stats().refreshes
    for _ in range(3):
        compiled(x)
    assert weight_cache.stats().refreshes == before
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            twin(x)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_no_two_forms_of_all_weights_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts or their float32, while they are packed; packed weights, while they are made again."""
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    compiled = FROZEN.compile(model)
    gc.collect()
    others = {w.data_ptr() for w in model.parameters()}
    others |= {id(t) for t in gc.get_objects() if type(t) is torch.Tensor}
    counts: list[int] = []

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            found = [t for t in gc.get_objects() if type(t) is torch.Tensor]
            large = [t for t in found if id(t) not in others and t.numel() == 96 * 96]
            forms = {t.data_ptr() if t.layout is torch.strided else id(t) for t in large}
            counts.append(len(forms - others))
            return result

        return call

    counted = functools.partial(lower.pack_graph, run=counting(run_node))
    monkeypatch.setattr(lower, "pack_graph", counted)
    monkeypatch.setattr(store, "compute", counting(cache_entry.compute))
    compiled(random(16, 96))
    assert len(counts) >= 2 * len(model)
    assert max(counts) <= len(model) + 2, counts
    counts.clear()
    for weight in model.parameters():
        weight.mul_(2)
    compiled(random(16, 96))
    assert len(counts) == len(model)
    assert max(counts) <= len(model) + 2, counts


# ------------------------------------------------------------------------------- the interface


@needs.FROZEN_GRAPHS
@pytest.mark.usefixtures("_low_products")
@torch.no_grad()
def test_stats_say_what_is_kept_of_which_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    compiled = FROZEN.compile(model)
    for _ in range(3):
        compiled(random(2, 64))
    stats = weight_cache.stats()
    by_weight = {value.weights: value for value in stats.values}
    assert set(by_weight) == {("0.weight",), ("0.bias",)}
    assert by_weight["0.weight",].bytes == 64 * 32 * 2
    is_packed = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert ("_reorder_linear_weight" in by_weight["0.weight",].ops) == is_packed
    assert (stats.entries, stats.bytes) == (2, (64 * 32 + 32) * 2)
    assert (stats.hits, stats.refreshes) == (6, 2), "the first call takes what was compiled with"
    (model_stats,) = stats.by_model.values()
    assert model_stats.bytes == stats.bytes


@torch.no_grad()
@pytest.mark.parametrize("is_on", [True, False])
def test_a_global_switch_is_honoured_and_never_stale(is_on: bool) -> None:
    net = make_net()
    twin = twin_of(net)
    with torch._inductor.config.patch(freezing=True):
        compiled = compile_amp_fx(net, compiler="inductor", freezing=is_on)
        for factor in (1.5, -2.0):
            FROZEN.check(compiled, net, twin)
            FROZEN.check(compiled, net, twin)
            for model in (net, twin):
                model.a.weight.mul_(factor)
        net.b.weight, twin.b.weight = (nn.Parameter(random(4, 4)) for _ in range(2))
        FROZEN.check(compiled, net, twin)
    assert is_packed() == (is_on and is_available())


@torch.no_grad()
def test_a_graph_without_results_is_compiled() -> None:
    net = make_net()

    def program(x: torch.Tensor) -> torch.Tensor:
        net.a(x)
        torch._dynamo.graph_break()
        return x + 1

    x = inputs()
    options: dict[str, Any] = {"fallback": False}
    assert torch.equal(torch.compile(program, backend="amp_fx", options=options)(x), x + 1)


def test_batches_of_any_size() -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = torch.compile(net, backend="amp_fx", dynamic=True)
    with torch.inference_mode():
        for batch in (3, 5, 1):
            for model in (net, twin):
                model.b.weight.data.mul_(1.25)
            x = random(batch, 4)
            with torch.autocast("cpu", torch.bfloat16):
                expected = twin(x).float()
            for _ in range(2):  # inductor multiplies by a single row in another way
                torch.testing.assert_close(compiled(x), expected, rtol=0.04, atol=0.04)

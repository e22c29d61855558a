"""Which graphs share cached values, and of which weights and regions nothing is cached."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights.cpu.few_rows import MAX_ROWS
from tests import needs
from tests.weights.keeping import FROZEN, TRAINED, Line, Way, batch
from tests.weights.nets import (
    EVAL,
    HALF,
    SIZE,
    TRAIN,
    Weight,
    assert_same,
    autocast,
    compile_amp_fx,
    gradients,
    inputs,
    make_net,
    random,
    square,
    twin_of,
)


def test_one_copy_of_each_dtype_for_all_graphs_of_a_model() -> None:
    net = make_net()
    first, second = compile_amp_fx(net), compile_amp_fx(net)
    first(inputs())
    with torch.no_grad():
        first(inputs())
        second(inputs())
    assert weight_cache.stats().entries == 3
    HALF.compile(net)(inputs())
    assert weight_cache.stats().entries == 6


class TwoDtypes(nn.Module):
    """One weight in a bfloat16 region and in a float16 one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight)
        with torch.autocast("cpu", torch.float16):
            z = functional.linear(x, self.weight)
        with torch.autocast("cpu", enabled=False):
            w = functional.linear(x, self.weight)
        return y.float() + z.float() + w


def test_two_dtypes_in_one_graph() -> None:
    """Eager's own cache would hand the bfloat16 cast to the float16 region: off for once."""
    model, twin = TwoDtypes(), TwoDtypes()
    compiled, plain = compile_amp_fx(model), compile_amp_fx(model, weight_cache=False)
    weight_cache.clear()
    for _ in range(3):
        out, expected = compiled(inputs()), plain(inputs())
        with torch.no_grad():
            with torch.autocast("cpu", cache_enabled=False):
                eager = twin(inputs())
            assert_same([out, compiled(inputs())], [eager, eager])
        assert_same(gradients(out, model), gradients(expected, model))
        for m in (model, twin):
            m.weight.data.mul_(1.5)
    assert weight_cache.stats().entries == 2


@pytest.mark.parametrize("num_rows", [0, 1])
def test_weights_without_elements_and_of_one_row(num_rows: int) -> None:
    model = Weight(torch.ones(num_rows, SIZE))
    twin = twin_of(model)
    compiled = EVAL.compile(model)
    for _ in range(3):
        EVAL.check(compiled, model, twin)
        for each in (model, twin):
            each.weight.data.mul_(1.25)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, twin = Weight(square().detach()), Weight(square().detach())
        compiled = compile_amp_fx(model)
        for _ in range(3):
            assert_same(compiled(inputs()), autocast(twin, inputs()))
            for m in (model, twin):
                m.weight.mul_(1.5)


def test_without_the_cache() -> None:
    net, twin = make_net(), make_net()
    compiled = TRAIN.compile(net, weight_cache=False)
    TRAIN.check(compiled, net, twin)
    assert weight_cache.stats().entries == 0


def test_a_region_that_disables_eager_caching_disables_ours() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        out, expected = compiled(inputs()), twin(inputs())
    assert_same(out, expected)
    assert_same(gradients(out, net), gradients(expected, twin))
    assert weight_cache.stats().entries == 0


# ------------------------------------------------------------------------------- packed weights

WIDTH = 64
LOW_BYTES = 2 * (2 * WIDTH * WIDTH + WIDTH)

pytestmark = pytest.mark.usefixtures("_low_products")  # packed low on any CPU
packs = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))


def check_packed(compiled: Any, twin: nn.Module, num_rows: int, dtype: torch.dtype) -> None:
    """Compares to the low dtype's rounding: inductor multiplies by one row in another way."""
    x = random(num_rows, WIDTH, seed=num_rows)
    with torch.autocast("cpu", dtype):
        expected = twin(x).float()
    torch.testing.assert_close(compiled(x), expected, rtol=0.02, atol=0.02)


@packs
@torch.no_grad()
def test_graphs_of_other_batch_sizes_and_dtypes_share_no_more_than_they_can() -> None:
    """Packed weights of two batch sizes are two values; no more than these are cached."""
    model = wide_net()
    twin = twin_of(model)
    low = compile_amp_fx(model, compiler="inductor", dtype=torch.bfloat16)
    half = compile_amp_fx(model, compiler="inductor", dtype=torch.float16)
    nets: Any = (model, twin)
    for step in range(3):
        for num_rows in (4, 6)[:: 1 if step % 2 else -1]:
            for _ in range(2):
                check_packed(low, twin, num_rows, torch.bfloat16)
            assert weight_cache.stats().bytes <= 2 * LOW_BYTES
        for net in nets:
            net[2].weight.data.mul_(-1.5)
            net[0].weight.data.add_(1e-3)  # which bfloat16 rounds away, and float16 does not
    before = weight_cache.stats().bytes
    check_packed(half, twin, 4, torch.float16)
    assert weight_cache.stats().bytes == before + LOW_BYTES


@packs
@needs.FROZEN_GRAPHS
@needs.PACKING
@torch.no_grad()
def test_what_needs_no_packing_is_made_once() -> None:
    """Few rows and many have other kernels, whose weights have other layouts."""
    compiled = compile_amp_fx(wide_net(), compiler="inductor")
    compiled(random(4, WIDTH))
    before = weight_cache.stats().refreshes
    compiled(random(2 * MAX_ROWS, WIDTH))
    assert weight_cache.stats().refreshes - before == 2, "the bias was cast again"


@packs
@needs.FROZEN_GRAPHS
@torch.no_grad()
def test_two_programs_of_a_model_share_values_until_their_code_goes() -> None:
    """What one of them computes again after a write is bound to the code of the other, too."""
    models, x = [wide_net() for _ in range(2)], random(2 * MAX_ROWS, WIDTH)
    for model in models:
        programs = []
        for added in (1, 2):
            program = functools.partial(lambda model, added, x: model(x) + added, model, added)
            programs.append(compile_amp_fx(program, compiler="inductor"))
        for factor in (1.0, -2.0, 0.5):
            model.get_parameter("0.weight").data.mul_(factor)
            first, second, third = (programs[i](x) for i in (0, 1, 0))
            assert_same(first, third)
            torch.testing.assert_close(second, first + 1)
    assert weight_cache.stats().bytes == 2 * LOW_BYTES
    torch._dynamo.reset()
    gc.collect()
    assert weight_cache.stats().bytes == 0


# ------------------------------------------------------------------------- autocast is off


class Off(nn.Module):
    """A program that switches mixed precision off itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)  # type: ignore[no-any-return]


@packs
@pytest.mark.parametrize("way", [FROZEN, TRAINED], ids=lambda way: way.name)
@pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
def test_off_keeps_nothing_and_changes_no_bit(way: Way, is_inside: bool) -> None:
    line, x = Line(), batch()
    model: nn.Module = Off(line) if is_inside else line
    for k in range(2):
        results = []
        for program in (torch.compile(model, dynamic=False), way.compile(model)):
            for _ in range(3):
                if is_inside:
                    results.append(way.call(program, x))
                else:
                    with torch.autocast("cpu", enabled=False):
                        results.append(way.call(program, x))
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))
        stats = weight_cache.stats()
        assert (stats.bytes, stats.entries, stats.values) == (0, 0, ())
        if k == 0:
            line.weight(1).data.mul_(-3)

"""Cached weights in the layouts of inductor's C++ templates, in blocks, and in huge pages."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from amp_fx import weight_cache
from amp_fx.torch_private.dynamo import counters
from amp_fx.torch_private.inductor import few_rows_kernel
from amp_fx.weights.cpu import few_rows, huge_pages
from tests import needs
from tests.weights.keeping import FROZEN, Line, Way, batch

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = [needs.FROZEN_GRAPHS, needs.PACKING]

TEMPLATES = Way("templates", (("max_autotune", True), ("max_autotune_gemm_backends", "CPP")))
"""Only templates compute products."""

WRITES: dict[str, Callable[[Line, int], Any]] = {
    "in place": lambda model, i: model.weight(i).mul_(-2),
    "data": lambda model, i: model.weight(i).data.add_(0.5),
    "other data": lambda model, i: setattr(model.weight(i), "data", model.weight(i) * 3),
    "foreach": lambda model, i: torch._foreach_mul_([model.weight(i)], 0.5),
    "numpy": lambda model, i: model.weight(i).numpy().fill(0.25),
    "state dict": lambda model, i: model[i].load_state_dict(
        {"weight": torch.full_like(model.weight(i), 0.125)}
    ),
    "other parameter": lambda model, i: setattr(
        model[i], "weight", nn.Parameter(model.weight(i) - 1)
    ),
}


def blocked() -> list[weight_cache.KeptValue]:
    """Returns the values that templates computed: nothing else pads a weight."""
    return [v for v in weight_cache.stats().values if "constant_pad_nd" in v.ops]


@torch.no_grad()
def test_templates_are_used() -> None:
    model = Line()
    TEMPLATES.warm(TEMPLATES.compile(model), batch())
    assert len(blocked()) == len(model)


@torch.no_grad()
@pytest.mark.one_in(2)
@pytest.mark.parametrize("columns", [17, 32, 100])
def test_a_refresh_gives_the_bits_of_a_new_compilation(columns: int) -> None:
    """Compares bits with those of a new compilation, also for padded weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, columns), nn.ReLU(), nn.Linear(columns, 48))
    x = torch.randn(4, 64)
    program = TEMPLATES.compile(model)
    program(x)
    for parameter in model.parameters():
        parameter.mul_(-1.5)
    refreshed = program(x)
    torch._dynamo.reset()
    weight_cache.clear()
    assert torch.equal(refreshed, TEMPLATES.compile(model)(x))


LAYOUTS = {"templates": TEMPLATES, "few rows": FROZEN, "huge pages": FROZEN}
"""Layouts of weights that oneDNN does not make, with ways of keeping that have them."""


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Gives small weights the layouts of large ones."""
    name: str = request.param
    if name == "few rows":
        if few_rows_kernel(torch.bfloat16, 1, 512, 512) is None:
            pytest.skip("the template has another kernel here")
        monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 0)
    if name == "huge pages":
        monkeypatch.setattr(huge_pages, "HUGE_PAGE", mmap.PAGESIZE)
        monkeypatch.setattr(huge_pages, "round", lambda _: 1, raising=False)
    return name


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(writes=st.lists(st.tuples(st.sampled_from([*WRITES]), st.integers(0, 2)), max_size=4))
@torch.no_grad()
def test_writes_are_seen(layout: str, writes: list[tuple[str, int]]) -> None:
    way = LAYOUTS[layout]
    model = Line()
    program = way.compile(model)
    way.warm(program, batch())
    for name, i in writes:
        WRITES[name](model, i)
        way.check(program, model, batch())
    way.check(program, model, batch())


@torch.no_grad()
def test_one_graph_serves_two_models() -> None:
    """A second model finds the code of the first in Dynamo's cache of its function."""
    models = [Line() for _ in range(2)]
    models[1].weight(0).mul_(-1)
    programs = [TEMPLATES.compile(model) for model in models]
    for _ in range(2):
        for model, program in zip(models, programs, strict=True):
            TEMPLATES.check(program, model, batch())


@torch.no_grad()
def test_a_new_process_of_the_same_graph_sees_writes(layout: str) -> None:
    """Code on the disk does not tell what templates computed, and is not taken for them."""
    way = LAYOUTS[layout]
    counters.clear()
    for factor in (1.0, -3.0):
        torch._dynamo.reset()
        model = Line()
        program = way.compile(model)
        way.call(program, batch())
        model.weight(1).mul_(factor)
        way.check(program, model, batch())
    assert bool(counters["inductor"]["fxgraph_cache_hit"]) == (layout != "templates")

"""Graphs for inductor's CUDA graphs read no unused input and return no static one; needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx import csrc
from amp_fx.backend.compilers import _backward_or_eager, compile_graph
from amp_fx.backend.lower import has_cudagraphs
from amp_fx.passes.separate_inputs import SEPARATED, SeparatedInputs, SeparateInputs
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable

ON = {"triton.cudagraphs": True}


def graph_of(*places: tuple[str, bool]) -> fx.GraphModule:
    """Returns a graph with an input for each device; what is read is returned, too."""
    graph, outputs = fx.Graph(), []
    with FakeTensorMode():
        for i, (device, is_read) in enumerate(places):
            node = graph.placeholder(f"x{i}")
            node.meta["val"] = torch.empty(4, device=device)
            if is_read:
                outputs += [graph.call_function(torch.ops.aten.relu.default, (node,)), node]
    graph.output(tuple(outputs))
    return fx.GraphModule(nn.Module(), graph)


def separated(gm: fx.GraphModule, *static: str) -> SeparatedInputs:
    """Runs the pass; returns what it separates."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    result = SeparateInputs(set(names).difference(static)).call(gm)
    gm.recompile()
    parts: SeparatedInputs = gm.meta.get(SEPARATED, SeparatedInputs({}, {}))
    assert result.counts["separated_outputs"] == len(parts.returned)
    return parts


def test_the_pass_only_runs_for_cuda_graphs() -> None:
    assert has_cudagraphs(ON)
    assert not has_cudagraphs({})


def test_only_inputs_that_nothing_reads_get_dummies() -> None:
    gm = graph_of(("meta", True), ("meta", False), ("cpu", False), ("meta", True))
    dummies = separated(gm).dummies
    assert {i: dummy.device.type for i, dummy in dummies.items()} == {1: "meta"}


@needs.WATCH
def test_a_replay_that_compares_addresses_asks_a_dummy_for_that_of_an_unused_weight() -> None:
    """CUDA graphs ask all static inputs for their addresses on every replay."""
    watch: Any = csrc.load()
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(2)
    assert watch.watch(weight)
    given: list[int] = []

    def replay(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given.extend(each.data_ptr() for each in inputs)
        return []

    parts = SeparatedInputs({0: torch.empty(1)}, {})
    for _ in range(2):
        parts.wrap(replay)([weight, x])
        assert watch.watched(weight)
    assert given[1] == given[3] == x.data_ptr()
    assert given[0] == given[2], "a dummy keeps its address"


def test_outputs_that_are_static_inputs_are_given_back_around_the_graph() -> None:
    gm, inputs = graph_of(("cpu", True), ("cpu", True)), [torch.ones(4), -torch.ones(4)]
    parts = separated(gm, "x0")

    def recorded(given: list[torch.Tensor]) -> list[torch.Tensor | None]:
        found = list(gm(*given))
        assert [out is None for out in found] == [False, True, False, False]
        return found

    outputs = parts.wrap(recorded)(inputs)
    assert outputs[1] is inputs[0]
    assert outputs[3] is inputs[1]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.t().t(),
        lambda x: x[1:, ::2],
        lambda x: x.view(-1, 2)[:, 1].unsqueeze(0).expand(3, -1),
        lambda x: x.split([1, 2])[1],
    ],
)
def test_views_of_static_inputs_are_given_back_around_the_graph(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Recordings would hold a view, and so keep the cached value from being written in place."""
    base = torch.arange(20.0)
    x, y = base[4:16].view(3, 4), torch.ones(3, 4)
    gm = make_fx(lambda x, y: (view(x), view(y), (x * y).t()), tracing_mode="fake")(x, y)
    parts = separated(gm, "x_1")

    def recorded(given: list[torch.Tensor]) -> list[torch.Tensor | None]:
        found = list(gm(*given))
        assert [out is None for out in found] == [True, False, False]
        return found

    out, *_ = parts.wrap(recorded)([x, y])
    torch.testing.assert_close(out, view(x), rtol=0, atol=0)
    assert (out.stride(), out.data_ptr()) == (view(x).stride(), view(x).data_ptr())


def test_complex_views_and_symbolic_views_of_static_inputs_stay_in_the_graph() -> None:
    z, x = torch.ones(3, 4, dtype=torch.complex64), torch.ones(3, 4)
    gm = make_fx(lambda z: (torch.view_as_real(z), z.conj()), tracing_mode="fake")(z)
    symbolic = make_fx(lambda x: (x.t(), x), tracing_mode="symbolic")(x)
    assert separated(gm, "z_1").returned == {}
    assert separated(symbolic, "x_1").returned.keys() == {1}


def returning_first() -> fx.GraphModule:
    """Returns a graph that returns a view of its first input, and a product."""
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    return make_fx(lambda x, y: (x.t(), x * y), tracing_mode="fake")(x, y)


@pytest.mark.falls_back
def test_a_backward_that_runs_op_by_op_returns_static_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm, x, y = returning_first(), torch.ones(2, 3), torch.full((2, 3), 2.0)
    separated(gm, "x_1")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("amp_fx.backend.compilers.compile_graph", fails)
    run = _backward_or_eager(gm, [x, y], is_backward=True)
    view, product = run([x, y])
    assert (view.shape, view.data_ptr()) == ((3, 2), x.data_ptr())
    assert torch.equal(product, x * y)


def test_a_graph_of_static_inputs_alone_returns_them() -> None:
    """Inductor compiles nothing if no call is left."""
    x = torch.ones(2, 3)
    gm = make_fx(lambda x: (x.t(),), tracing_mode="fake")(x)
    separated(gm, "x_1")
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(values[0].fake_mode):
        compiled = compile_graph(gm, values)
    (view,) = compiled([x])
    assert (view.shape, view.data_ptr()) == ((3, 2), x.data_ptr())


def train(model: nn.Module) -> list[torch.Tensor]:
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "fallback": False,
        "weight_cache": "training",
        **ON,
    }
    compiled = torch.compile(model, backend="amp_fx", options=options)
    out = compiled(torch.linspace(-1, 1, 32).view(4, 8))
    model.zero_grad()
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
def test_no_cache_gives_a_graph_without_what_was_put_around_it() -> None:
    """AOTAutograd's cache would give a second process the graph alone, which lacks outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        expected = train(model)
        counters.clear()
        found = train(model)
        assert counters["inductor"]["fxgraph_cache_hit"] > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

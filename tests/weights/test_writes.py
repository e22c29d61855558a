"""No way to change a weight leaves anything stale: in frozen, kept and trained graphs alike."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests import needs
from tests.weights.nets import EVAL, HALF, TRAIN, Graph, Net, compile_amp_fx, inputs, make_net
from tests.weights.writes import NEVER_KEPT, SIGNALS, WRITES, write_called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from tests.weights.nets import Program

    Order = Callable[["Models"], None]


@dataclasses.dataclass(frozen=True)
class FrozenGraph(Graph):
    """A graph whose weights inductor packs."""

    def compile(self, model: nn.Module, **options: Any) -> Program:
        return compile_amp_fx(model, dtype=self.dtype, compiler="inductor", **options)


FROZEN = FrozenGraph("frozen")
needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")

PAIRS: tuple[tuple[Graph, Graph], ...] = ((TRAIN, EVAL), (EVAL, HALF), (FROZEN, EVAL))
"""Two graphs of one model. What is kept of a weight belongs to both, or is of two dtypes."""

ALL_PAIRS = pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=needs_compiler if FROZEN in pair else ()) for pair in PAIRS],
    ids=lambda pair: "-".join(graph.name for graph in pair),
)


@pytest.fixture(autouse=True)
def _recompiles_without_end() -> Iterator[None]:
    """One graph may serve many models, one after the other."""
    limits: dict[str, Any] = {"recompile_limit": 10**3, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits):
        yield


# ------------------------------------------------------------------------ writes and their order

PENDING: list[Callable[[], None]] = []
"""What happens in the next call, behind its first product."""


@torch.library.custom_op("amp_fx_writes::happen", mutates_args=())
def happen(x: torch.Tensor) -> torch.Tensor:
    """Does something that no graph knows of."""
    while PENDING:
        PENDING.pop()()
    return x.clone()


@happen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


happen.register_autograd(lambda _, grad: grad)


class EventfulNet(Net):
    """``Net`` that runs the pending events of ``happen`` during a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(happen(torch.relu(self.a(x))))  # type: ignore[no-any-return]


class Models:
    """A model with two graphs, its twin, and a way to write to both models.

    Args:
        write: Name of the way.
        pair: The graphs.
        is_eventful: Whether something may happen in calls.
        **options: Of the backend.
    """

    def __init__(
        self, write: str, pair: tuple[Graph, Graph], *, is_eventful: bool = False, **options: Any
    ) -> None:
        self.net, self.twin = make_net(), make_net()
        if is_eventful:
            self.net.__class__ = EventfulNet
        self.write_net, self.write_twin = (write_called(write)(m) for m in (self.net, self.twin))
        self.graphs = [(graph, graph.compile(self.net, **options)) for graph in pair]

    def check(self, *which: int) -> None:
        """Calls some of the graphs, and compares outputs and gradients with the twin's."""
        for k in which:
            graph, program = self.graphs[k]
            graph.check(program, self.net, self.twin)

    def write(self, i: int) -> None:
        """The step with a number."""
        self.write_net(i)
        self.write_twin(i)

    def write_inside(self, i: int) -> None:
        """Writes both models, the compiled one during a call of the first graph."""
        graph, program = self.graphs[0]
        PENDING.append(functools.partial(self.write_net, i))
        with torch.set_grad_enabled(graph.is_trained):
            program(inputs().to(self.net.a.weight.dtype))
        assert not PENDING
        self.write_twin(i)

    def warm(self) -> bool:
        """Calls both graphs several times; returns whether values are kept for them."""
        weight_cache.clear()
        self.check(0, 1, 0, 1, 0, 1)
        made = weight_cache.stats().refreshes
        self.check(0, 1)
        stats = weight_cache.stats()
        return stats.bytes > 0 and stats.hits > 0 and stats.refreshes == made


def between_calls(models: Models) -> None:
    """Writes between calls: detecting a write in one graph must not hide it from the other."""
    for i, which in enumerate(((0, 1), (1, 0), (1,), (0,), (0, 1))):
        models.write(i)
        models.check(*which)


def after_the_first_call(models: Models) -> None:
    """Values may not have been made yet, or by this very call."""
    models.check(0)
    for i in range(2):
        models.write(i)
        models.check(0, 0, 1)


def inside_a_call(models: Models) -> None:
    """One weight has been read by then, the other has not."""
    for i in range(2):
        if models.net.a.weight.dtype != torch.float32:
            break  # two products of one call in two dtypes: eager code raises, too
        models.write_inside(i)
        models.check(0, 0, 1)


ORDERS: dict[str, Order] = {
    order.__name__: order for order in (between_calls, after_the_first_call, inside_a_call)
}


def check_never_stale(write: str, pair: tuple[Graph, Graph], **options: Any) -> None:
    """One way to write, between calls of two new graphs."""
    models = Models(write, pair, **options)
    models.check(0, 1)
    between_calls(models)


def check_order(write: str, pair: tuple[Graph, Graph], order: Order, **options: Any) -> None:
    """One way to write in one order; the graphs are those of an earlier model if possible."""
    new = functools.partial(
        Models, write, pair, is_eventful=order is inside_a_call, fallback=False, **options
    )
    models = new()
    if order is not after_the_first_call and not models.warm() and write not in NEVER_KEPT:
        torch._dynamo.reset()  # the graphs found that keeping does not pay for an earlier model
        models = new()
        assert models.warm(), "nothing is kept: there is nothing to test"
    order(models)


@pytest.mark.one_in(4)
@ALL_PAIRS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_never_stale(signal: str, order: str, pair: tuple[Graph, Graph]) -> None:
    """Compares samples only for writes that no other signal reports."""
    verify = "sample" if signal == "sample" else "off"

    def failure(write: str) -> str:
        try:
            check_order(write, pair, ORDERS[order], verify=verify)
        except (AssertionError, RuntimeError) as error:
            PENDING.clear()
            torch._dynamo.reset()
            return f"{write}: {type(error).__name__}: {error}"[:300]
        return ""

    wrong = [text for write in SIGNALS[signal] if (text := failure(write))]
    assert not wrong, "\n".join(wrong)


@needs_compiler
def test_a_frozen_graph_next_to_training() -> None:
    check_never_stale("everything", (FROZEN, TRAIN))


# ---------------------------------------------------------- whether the table would find anything


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_has_writes(signal: str) -> None:
    assert SIGNALS[signal]
    assert all(write in WRITES for write in SIGNALS["storage"] + SIGNALS["place"])


@needs.WATCH
@pytest.mark.parametrize("graph", [EVAL, TRAIN], ids=lambda graph: graph.name)
def test_the_table_would_notice_a_cache_that_never_refreshes(graph: Graph) -> None:
    """Fails after a write that no signal reports, with samples disabled."""
    with pytest.raises(AssertionError, match="not equal"):
        check_order("array_taken_before", (graph, EVAL), between_calls, verify="off")


@needs.FROZEN_GRAPHS
def test_frozen_graphs_are_frozen_at_all_and_would_be_found_stale() -> None:
    models = Models("array_taken_before", (FROZEN, EVAL), fallback=False, verify="off")
    assert models.warm()
    frozen = {value.weights for value in weight_cache.stats().values}
    assert frozen == {("a.weight",), ("a.bias",), ("b.weight",)}
    with pytest.raises(AssertionError, match="not equal"):
        between_calls(models)


def test_copies_are_kept_at_all() -> None:
    net, twin = make_net(), make_net()
    compiled = EVAL.compile(net)
    weight_cache.clear()
    for _ in range(5):
        EVAL.check(compiled, net, twin)
    stats = weight_cache.stats()
    assert (stats.entries, stats.refreshes) == (3, 3)


@torch.no_grad()
def test_a_write_noticed_by_one_graph_is_not_hidden_from_another() -> None:
    net, twin = make_net(), make_net()
    graphs = [EVAL.compile(net), EVAL.compile(net.a)]
    oracles = [twin, twin.a]
    for _ in range(2):
        for compiled, oracle in zip(graphs, oracles, strict=True):
            EVAL.check(compiled, net, oracle)
    for order in ((0, 1), (1, 0)):
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)
        for k in order:
            EVAL.check(graphs[k], net, oracles[k])

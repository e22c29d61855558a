"""No way to change a weight leaves a stale copy, in either of two graphs of one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_fx import weight_cache
from tests.weights.nets import EVAL, HALF, TRAIN, Graph, Net, make_net, twin_of
from tests.weights.writes import WRITES

PAIRS = [(TRAIN, EVAL), (TRAIN, HALF)]
SAME_ADDRESS = {
    "data_swapped_inside",
    "averages_swapped_by_pointer",
    "swapped_with_another_model",
    "data_transposed_and_written",
}
"""Weights that come back to an address at which a graph knew other contents."""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(g.name for g in pair))
def test_never_stale(write: str, pair: tuple[Graph, Graph]) -> None:
    check_never_stale(write, pair)


def check_never_stale(write: str, pair: tuple[Graph, Graph]) -> None:
    net, twin = make_net(), make_net()
    steps = WRITES[write](net), WRITES[write](twin)
    graphs: list[tuple[Graph, Any]] = [(graph, graph.compile(net)) for graph in pair]
    for graph, compiled in graphs:
        graph.check(compiled, net, twin)
    orders = ((0, 1), (1, 0), (1,), (0,), (0, 1))
    for i, order in enumerate(orders):
        for step in steps:
            step(i)
        for k in order:
            graph, compiled = graphs[k]
            graph.check(compiled, net, twin)


def test_the_table_would_notice_a_cache_that_never_refreshes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def through_an_old_array(net: Net) -> Any:
        array = net.a.weight.detach().numpy()

        def step(_: int) -> None:
            array.__imul__(1.5)

        return step

    monkeypatch.setitem(WRITES, "old array", through_an_old_array)
    monkeypatch.setenv("AMP_FX_VERIFY", "off")
    with pytest.raises(AssertionError):
        check_never_stale("old array", (TRAIN, EVAL))


def test_copies_are_kept_at_all() -> None:
    net = make_net()
    twin = twin_of(net)
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

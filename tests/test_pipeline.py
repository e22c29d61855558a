"""pipeline: the runner does what no pass does itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import fx

from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.errors import PassError, UnsupportedError
from amp_fx.graphs.values import set_value
from amp_fx.passes.base import PassResult
from amp_fx.weights.read_only import CHECK_ENVIRONMENT
from tests.programs import POLICY, capture_program, site

if TYPE_CHECKING:
    from tests.programs import Captured


@dataclasses.dataclass(frozen=True)
class Rename:
    """Makes every relu a sigmoid."""

    name: ClassVar[str] = "rename"

    def call(self, gm: fx.GraphModule) -> PassResult:
        nodes = gm.graph.find_nodes(op="call_method", target="relu")
        for node in nodes:
            node.target = "sigmoid"
        return PassResult(Counter(renamed=len(nodes), left=0))


@dataclasses.dataclass(frozen=True)
class Raise:
    """Fails."""

    name: ClassVar[str] = "raise"
    error: Exception

    def call(self, _: fx.GraphModule) -> PassResult:
        raise self.error


@dataclasses.dataclass(frozen=True)
class RaiseForProducts(Raise):
    """Fails if it is called for a graph, which must have a product."""

    name: ClassVar[str] = "raise_for_products"
    ops: ClassVar[frozenset[str]] = frozenset({"aten::mm"})


@dataclasses.dataclass(frozen=True)
class MakeStale:
    """Records a value that is not the node's."""

    name: ClassVar[str] = "make_stale"

    def call(self, gm: fx.GraphModule) -> PassResult:
        node = gm.graph.find_nodes(op="call_method")[0]
        node.meta["site"] = site()
        set_value(node.all_input_nodes[0], torch.ones(4))
        set_value(node, torch.ones(4, dtype=torch.float64))
        return PassResult(Counter())


@dataclasses.dataclass(frozen=True)
class BreakOrder:
    """Leaves a graph that does not lint."""

    name: ClassVar[str] = "break_order"

    def call(self, gm: fx.GraphModule) -> PassResult:
        first, last = gm.graph.find_nodes(op="call_method")
        last.append(first)
        return PassResult(Counter(moved=1))


@pytest.fixture
def captured(rng: torch.Generator) -> Captured:
    return capture_program(lambda x: x.relu().exp(), torch.randn(4, generator=rng))


def test_modified_graphs_are_recompiled(captured: Captured, rng: torch.Generator) -> None:
    x = torch.randn(4, generator=rng)
    [report] = run_passes(captured.gm, [Rename()])
    assert torch.equal(captured(x), x.sigmoid().exp())
    assert report.name == "rename"
    assert report.counts == {"renamed": 1}
    assert report.seconds > 0


def test_a_pass_is_called_for_graphs_with_its_ops_only() -> None:
    gm = fx.GraphModule({}, fx.Graph())
    x = gm.graph.placeholder("x")
    gm.graph.output(gm.graph.call_function(torch.ops.aten.exp.default, (x,)))
    failing = RaiseForProducts(ZeroDivisionError("called"))
    [report] = run_passes(gm, [failing])
    assert report.counts == {}
    with gm.graph.inserting_after(x):
        gm.graph.call_function(torch.ops.aten.mm.default, (x, x))
    with pytest.raises(PassError, match="called"):
        run_passes(gm, [failing])


def test_the_error_of_a_pass_is_the_cause(captured: Captured) -> None:
    cause = ZeroDivisionError("why")
    with pytest.raises(PassError, match="after no other pass on this graph") as raised:
        run_passes(captured.gm, [Raise(cause)])
    assert raised.value.__cause__ is cause


def test_graph_that_does_not_lint_is_the_fault_of_its_pass(captured: Captured) -> None:
    with pytest.raises(PassError, match="'break_order' failed"):
        run_passes(captured.gm, [BreakOrder()])


def test_errors_on_purpose_pass_unwrapped(captured: Captured) -> None:
    with pytest.raises(UnsupportedError, match="as it is"):
        run_passes(captured.gm, [Raise(UnsupportedError("as it is"))])


def test_check_by_argument_and_by_environment(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHECK_ENVIRONMENT, raising=False)
    run_passes(captured.gm, [MakeStale()])
    with pytest.raises(AssertionError, match="after make_stale"):
        run_passes(captured.gm, [MakeStale()], check=True)
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    with pytest.raises(AssertionError, match="after make_stale"):
        run_passes(captured.gm, [MakeStale()])
    run_passes(captured.gm, [MakeStale()], check=False)


def test_captured_passes_in_order() -> None:
    names = [p.name for p in captured_passes(POLICY, site(), restores_outputs=True)]
    assert names == [
        "mark_regions",
        "insert_casts",
        "restore_outputs",
        "hoist_casts",
        "fold_casts",
        "wrap_opaque_nodes",
    ]
    ambient = [p.name for p in captured_passes(POLICY, site(), restores_outputs=False)]
    assert set(names) - set(ambient) == {"restore_outputs"}

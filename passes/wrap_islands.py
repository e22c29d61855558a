"""Runs islands under native autocast, as the uncompiled program would.

Before:
    %y = higher_order.flex_attention(%q, %k, %v, ...)        # island, site: cpu bfloat16
After:
    %enter = _enter_autocast("cpu", torch.bfloat16, True, True)
    %y     = higher_order.flex_attention(%q, %k, %v, ...)
    %exit  = _exit_autocast(%enter)

Neighbouring islands of one region share a pair of markers. Left alone on purpose: islands
that take no tensor, and islands where no device autocasts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from amp_fx.graphs.bodies import rewritten_bodies
from amp_fx.graphs.islands import TRANSFORM
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx


@dataclasses.dataclass(frozen=True)
class WrapIslands:
    """Puts autocast markers around islands."""

    name: ClassVar[str] = "wrap_islands"

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``islands``; bodies of higher-order ops are wrapped too."""
        counts: Counter[str] = Counter()
        for run in _island_runs(gm.graph):
            if not run[0].meta.get("is_wrapped_island"):
                _wrap(gm.graph, run)
                counts["islands"] += 1
        for body in rewritten_bodies(gm):
            counts.update(self.call(body).counts)
        return PassResult(counts)


def _island_runs(graph: fx.Graph) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    previous = None
    for node in graph.nodes:
        if _needs_autocast(node):
            site = node.meta["site"]
            if previous is not None and runs and previous.meta["site"] == site:
                runs[-1].append(node)
            else:
                runs.append([node])
            previous = node
        elif node.op != "get_attr":
            previous = None
    return runs


def _needs_autocast(node: fx.Node) -> bool:
    if "island" not in node.meta or not node.meta["site"].state.enabled:
        return False
    return node.meta["island"] == TRANSFORM or bool(tensors_in(*argument_values(node)))


def _wrap(graph: fx.Graph, run: list[fx.Node]) -> None:
    site = run[0].meta["site"]
    with graph.inserting_before(run[0]):
        enters = [graph.call_function(_enter_autocast, m) for m in site.state.markers()]
    with graph.inserting_after(run[-1]):
        exits = [graph.call_function(_exit_autocast, (enter,)) for enter in reversed(enters)]
    for node in (*enters, *exits):
        node.meta["site"] = site
    for node in run:
        node.meta["is_wrapped_island"] = True

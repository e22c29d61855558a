"""Runs opaque regions under native autocast, as in the uncompiled program.

Before:
    %y = higher_order.flex_attention(%q, %k, %v, ...)        # opaque node, site: cpu bfloat16
After:
    %enter = _enter_autocast("cpu", torch.bfloat16, True, True)
    %y     = higher_order.flex_attention(%q, %k, %v, ...)
    %exit  = _exit_autocast(%enter)

Adjacent opaque nodes of one region share a pair of markers. Left unchanged: opaque nodes without
tensor inputs, and opaque nodes in which autocast is off for all devices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.bodies import rewritten_bodies
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.markers import enter_region, exit_region
from amp_fx.graphs.metadata import IS_WRAPPED, OPAQUE, SITE
from amp_fx.graphs.opaque import TRANSFORM
from amp_fx.graphs.policy_mode import warn_of_policy
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class WrapOpaqueNodes:
    """Inserts autocast markers around opaque regions."""

    name: ClassVar[str] = "wrap_opaque_nodes"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``opaque_nodes``, also in bodies of higher-order ops."""
        counts: Counter[str] = Counter()
        for run in _opaque_runs(gm.graph):
            if not IS_WRAPPED.is_on(run[0]):
                _wrap(gm, run)
                counts["opaque_nodes"] += 1
        for body in rewritten_bodies(gm):
            counts.update(self.call(body).counts)
        return PassResult(counts)


def _opaque_runs(graph: fx.Graph) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    previous = None
    for node in graph.nodes:
        if needs_autocast(node):
            site = SITE.of(node)
            if previous is not None and runs and SITE.of(previous) == site:
                runs[-1].append(node)
            else:
                runs.append([node])
            previous = node
        elif node.op != "get_attr":
            previous = None
    return runs


def needs_autocast(node: fx.Node) -> bool:
    """Returns True if native autocast may change the results of an opaque region."""
    if not OPAQUE.is_on(node) or not SITE.of(node).state.enabled:
        return False
    return OPAQUE.of(node) == TRANSFORM or bool(tensors_in(*argument_values(node)))


def _wrap(gm: fx.GraphModule, run: list[fx.Node]) -> None:
    graph, site = gm.graph, SITE.of(run[0])
    with graph.inserting_before(run[0]):
        enters = enter_region(graph, site.state.markers())
    with graph.inserting_after(run[-1]):
        exits = exit_region(graph, enters)
    for node in (*enters, *exits):
        SITE.put(node, site)
    for node in run:
        IS_WRAPPED.put(node, True)
    if site.state.policy is not None:
        warn_of_policy(gm, run, site.state.policy, site.state.enabled)

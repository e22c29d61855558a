"""Decides which values of weights a graph of AOTAutograd caches.

``plan`` changes nothing. ``split`` applies a plan to a graph whose cached values are inputs. A
graph with packed weights is edited first (``packing_passes``), and ``Constants.plan`` describes it.
``explain``, ``draw`` and the debug log read the same plan that is compiled.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.purity import is_pure
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import is_symbolic, tensors_in
from amp_fx.weights.aliases import escaping, is_view, viewed_by, written_inputs
from amp_fx.weights.inputs import WRITTEN
from amp_fx.weights.prepare import Prepare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from amp_fx.weights.inputs import Candidates
    from amp_fx.weights.prepare import CachedValueSpec

    Copies = dict[fx.Node, fx.Node]

log = logging.getLogger("amp_fx.caching")

PLAN = "amp_fx_cache_plan"
"""Key of the plan in ``gm.meta``, between the pass that applies it and the compilation."""

RETURNED = "its values are returned, and the caller may write to them"
LARGER = "its values are larger than the weight"
UNREAD = "the graph does not read it"
AS_IT_IS = "kernels read it as it is"
IMPURE = "{op} cannot be cached: its result does not depend on its arguments alone"


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
    """Values that the code of one graph caches.

    Attributes:
        values: The values that are the last inputs of the code, in order.
        constants: The values that are constants of the code.
        passed: Positions of the original inputs that the code still gets, before the values.
        uncached: For the name of each weight without a cached value, the reason.
        nodes: Of a graph that is not packed: the nodes whose results are cached, with their copies
            in the graph that computes them.
    """

    values: tuple[CachedValueSpec, ...] = ()
    constants: tuple[CachedValueSpec, ...] = ()
    passed: tuple[int, ...] = ()
    uncached: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nodes: Mapping[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)

    @property
    def computed(self) -> tuple[CachedValueSpec, ...]:
        """The values that take memory, without aliases of weights."""
        return tuple(spec for spec in (*self.constants, *self.values) if not spec.is_alias)

    @property
    def aliases(self) -> tuple[CachedValueSpec, ...]:
        """The aliases of weights that the code reads themselves."""
        return tuple(spec for spec in (*self.constants, *self.values) if spec.is_alias)

    def log_reasons(self) -> None:
        """Logs what is cached, and why other weights have no cached value."""
        for spec in self.computed:
            log.debug("cached: %s of %s", ", ".join(spec.ops), ", ".join(spec.names))
        for name, reason in self.uncached.items():
            log.debug("not cached: %s: %s", name, reason)


def plan(gm: fx.GraphModule, candidates: Candidates, num_returned: int) -> CachePlan:
    """Finds the values that become inputs of a graph. Changes nothing.

    Args:
        gm: A graph of AOTAutograd, forward or joint, whose nodes have their values.
        candidates: Its weights, by their positions in the graph.
        num_returned: Number of outputs that are returned to the caller.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = {i: weight.name for i, weight in candidates.weights.items()}
    prepare = Prepare(names)
    # A value of a weight that the graph itself writes would be stale after every call.
    written, escaped = written_inputs(gm), escaping(gm, num_returned)
    sources = {
        placeholders[i]: prepare.weight(i, VALUE.of(placeholders[i]))
        for i in names
        if placeholders[i] not in written
    }
    # The caller may write to what it gets. A weight that is returned as it is stays the caller's.
    copies = copy_prepared(gm, sources, prepare, skipped=escaped - set(placeholders))
    nodes = {n: copies[n] for n in values_read(copies, prepare, sources, has_views=False)}
    specs = prepare.specs(nodes.values())
    uncached = why_uncached(placeholders, candidates, written, escaped)
    # Aliases alone cache nothing: the graph then reads the weights themselves, and is not changed.
    if not nodes:
        return CachePlan(passed=tuple(range(len(placeholders))), uncached=uncached)
    still_read = _nodes_needed(gm, nodes)
    aliases = [prepare.alias(copy) for node, copy in sources.items() if node in still_read]
    return CachePlan(
        values=(*specs, *aliases),
        passed=tuple(i for i, node in enumerate(placeholders) if node not in sources),
        uncached=without_values(specs, uncached),
        nodes=nodes,
    )


def why_uncached(
    placeholders: Sequence[fx.Node],
    candidates: Candidates,
    written: Collection[fx.Node],
    returned: Collection[fx.Node],
) -> dict[str, str]:
    """Returns for each weight the reason that would hold if none of its values were cached.

    Args:
        placeholders: The inputs of the graph.
        candidates: Its weights, by position, and those that were rejected.
        written: The inputs that the graph writes.
        returned: The nodes whose results escape to the caller.
    """
    names = {placeholders[i]: weight.name for i, weight in candidates.weights.items()}
    reasons = {
        name: WRITTEN if node in written else _why(node, names, returned)
        for node, name in names.items()
    }
    return {**candidates.rejected, **reasons}


def _why(weight: fx.Node, weights: Collection[fx.Node], returned: Collection[fx.Node]) -> str:
    if not weight.users:
        return UNREAD
    readers = [user for user in weight.users if user.op == "call_function"]
    alone = [user for user in readers if all(n in weights for n in user.all_input_nodes)]
    if weight in returned or any(user in returned for user in alone):
        return RETURNED
    for user in alone:
        if not is_pure(user):
            return IMPURE.format(op=user.target)
        if not _fits(user, [weight]):
            return LARGER
    return AS_IT_IS


def without_values(specs: Iterable[CachedValueSpec], reasons: Mapping[str, str]) -> dict[str, str]:
    """Returns the reasons of the weights that no value is computed from."""
    cached = {name for spec in specs if not spec.is_alias for name in spec.names}
    return {name: reason for name, reason in reasons.items() if name not in cached}


def _nodes_needed(gm: fx.GraphModule, given: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that a graph still needs if the results of ``given`` are inputs."""
    needed: set[fx.Node] = set()
    pending = [node for node in gm.graph.nodes if node.op != "placeholder" and node.is_impure()]
    while pending:
        node = pending.pop()
        if node not in needed and node not in given:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def copy_prepared(
    gm: fx.GraphModule, sources: Copies, prepare: Prepare, *, skipped: Collection[fx.Node] = ()
) -> Copies:
    """Copies every node that depends on weights alone into ``prepare``.

    Args:
        gm: A graph whose nodes have their values in ``meta["val"]``.
        sources: Nodes of ``gm`` that are weights or cached values, with their copies.
        prepare: The graph that receives the copies.
        skipped: Nodes that are not copied.

    Nodes whose results take more memory than the weights and than the sources that they depend on
    are not copied either.

    Returns:
        The copies by node, including those of ``sources``.
    """
    copies = dict(sources)
    read: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset((node,)) for node in sources}
    for node in gm.graph.nodes:
        if node in copies or node in skipped:
            continue
        if node.op == "get_attr":
            constant = _attribute(gm, str(node.target))
            if isinstance(constant, torch.Tensor):
                copies[node] = prepare.add(node, copies, constant)
                read[node] = frozenset()
        elif is_preparable(node, copies):
            copy = prepare.add(node, copies)
            read[node] = frozenset().union(*map(read.__getitem__, node.all_input_nodes))
            # Weights that inductor joins can be larger than the one weight they come from.
            if _fits(node, prepare.weights_of(copy)) or _fits(node, read[node]):
                copies[node] = copy
    return copies


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    attribute: Any = gm
    for name in target.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


def is_preparable(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """Returns True for a pure op that reads nothing but nodes known to depend on weights alone."""
    if node.op != "call_function" or not is_pure(node):
        return False
    values = tensors_in(VALUE.get(node))
    # Ops that pack weights have no fake kernels, so their nodes have no values.
    if any(map(is_symbolic, values)) or (VALUE.is_on(node) and not values):
        return False
    return all(source in known for source in node.all_input_nodes)


def _fits(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Returns True if the result takes no more memory than what it is computed from.

    Args:
        node: An op.
        sources: The weights, or the existing values, that it depends on.
    """
    if not sources or is_view(node):
        return True  # a tensor constructor has no sources; the nodes that read it need the copy
    size = sum(map(num_bytes, tensors_in(VALUE.get(node))))
    return size <= sum(num_bytes(VALUE.of(source)) for source in sources)


def values_read(
    copies: Copies, prepare: Prepare, sources: Collection[fx.Node], *, has_views: bool
) -> list[fx.Node]:
    """Returns the copied nodes that the rest of the graph reads.

    Args:
        copies: Nodes that depend on weights alone, with their copies.
        prepare: The graph that contains the copies.
        sources: Nodes that need no computation: weights and existing values.
        has_views: Whether to return a view that is read; otherwise returns the base of the view.
    """
    values: dict[fx.Node, None] = {}
    for node in copies:
        # A result that only copies read is an intermediate result of the value that they compute.
        if all(user in copies for user in node.users):
            continue
        base = node if has_views else viewed_by(node)
        if base not in sources and prepare.weights_of(copies[base]):
            values[base] = None
    return list(values)

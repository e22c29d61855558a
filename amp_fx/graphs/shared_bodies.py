"""Bodies that several calls share: those of ``torch.compiler.nested_compile_region``.

Dynamo captures the body of ``invoke_subgraph`` at its first call, and calls it again where the
operands have the same metadata. The modules and policies that it records are those of the first
call. AOTAutograd and inductor trace a body once per identifier, with the dtypes of its first call.
A rewritten body therefore has an identifier of its own, and calls only share it if their operands,
regions, policies and modules have the same effect.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.graphs.bodies import (
    bodies_of,
    body_nodes,
    copy_graph_module,
    graph_modules_in,
    graphs_in,
    has_shared_bodies,
    operands_of,
)
from amp_fx.graphs.decompose import value_key
from amp_fx.graphs.metadata import CUSTOM, MODULE_STACK, VALUE
from amp_fx.graphs.policy_mode import annotated_policy, is_policy_annotation
from amp_fx.graphs.values import is_written, recorded_value, set_value
from amp_fx.regions.module_stack import NO_FRAME, module_stack
from amp_fx.regions.names import plain_name
from amp_fx.torch_private import pytree
from amp_fx.torch_private.higher_order import (
    inline_invoke_subgraph,
    inline_single_use_invoke_subgraph,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amp_fx.graphs.records import AutocastSite
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame


@dataclasses.dataclass(frozen=True)
class SharedBody:
    """A rewritten body.

    Attributes:
        body: The body.
        identifier: Torch's key for what it traced of the body.
        results: The values of the results of its first call.
    """

    body: fx.GraphModule
    identifier: str
    results: Any


class SharedBodies:
    """The rewritten bodies of one captured graph, including those that other bodies call.

    Args:
        gm: The captured graph.
        policy: The cast policy where no region has another one.
        frame: The modules around the graph.
    """

    def __init__(self, gm: fx.GraphModule, policy: Policy, frame: CompileFrame = NO_FRAME) -> None:
        self._policy = policy
        self._frame = frame
        self._paths = dict(_weight_paths(gm)) if has_shared_bodies(gm) else {}
        self._first_module: dict[str, str] = {}
        self._bodies: dict[Any, SharedBody] = {}
        self._num_bodies = 0

    def body_of(self, gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
        """Returns a copy of the body of a call, with the modules and policy of this call."""
        (captured,) = bodies_of(gm, node)
        body = copy_graph_module(captured)
        renames = self._renames(captured, node)
        # Dynamo annotated the body in its first call, also with the policies around that call. Only
        # those are on the output.
        outer = set(filter(is_policy_annotation, CUSTOM.get(body.graph.output_node()) or ()))
        for graph in graphs_in(body):
            for inner in graph.nodes:
                annotations = CUSTOM.get(inner) or {}
                if not outer.isdisjoint(annotations):
                    kept = {key: annotations[key] for key in annotations if key not in outer}
                    CUSTOM.put(inner, kept)
                stack = MODULE_STACK.get(inner)
                if renames and stack:
                    MODULE_STACK.put(inner, _rename_stack(stack, renames))
        return body

    def key_of(self, node: fx.Node, body: fx.GraphModule, site: AutocastSite) -> Any:
        """Returns a key that is equal for calls whose rewritten bodies are equal."""
        values = [
            VALUE.get(operand) if isinstance(operand, fx.Node) else operand
            for operand in operands_of(node)
        ]
        # One tensor that is passed twice is one tensor in the body, with two casts to share.
        identities = list(map(id, values))
        policy = site.state.policy or self._policy
        stacks: list[object] = []
        for graph in graphs_in(body):
            for inner in graph.nodes:
                resolver = (annotated_policy(body, inner) or policy).resolver
                if resolver.depends_on_module:
                    stacks.append(resolver.stack_key(module_stack(inner, self._frame)))
                # Whether a product runs in float8 depends on the position of its weight in the
                # model. Such bodies are not shared.
                if resolver.has_float8:
                    stacks.append(node)
        return (
            node.args[1],
            tuple(map(_operand_key, values)),
            tuple(map(identities.index, identities)),
            site,
            tuple(stacks),
        )

    def find(self, key: Any) -> SharedBody | None:
        """Returns the body that was added for an equal key, or None."""
        return self._bodies.get(key)

    def add(self, key: Any, node: fx.Node, body: fx.GraphModule, results: Any) -> SharedBody:
        """Adds the rewritten body of a call, unless it writes to its operands.

        The values of the operands of a later call would not show such a write.
        """
        # AOTAutograd and inductor trace one body per identifier, in the dtypes of its first call.
        identifier = f"amp_fx_{node.args[1]}_{self._num_bodies}"
        self._num_bodies += 1
        shared = SharedBody(body, identifier, results)
        if not any(map(is_written, body.graph.find_nodes(op="placeholder"))):
            self._bodies[key] = shared
        return shared

    def _renames(self, body: fx.GraphModule, node: fx.Node) -> dict[str, str]:
        """Returns the new paths of the modules that a body calls, by the paths of its first call.

        The modules are those around the call, and those that own weights among the operands.
        """
        stack = list((MODULE_STACK.get(node) or {}).values())
        path = plain_name(stack[-1][0]) if stack else ""
        pairs = [(self._first_module.setdefault(str(node.args[1]), path), path)]
        placeholders = body.graph.find_nodes(op="placeholder")
        for inner, operand in zip(placeholders, operands_of(node), strict=True):
            old = self._paths.get(id(recorded_value(inner)))
            new = self._paths.get(id(VALUE.get(operand))) if isinstance(operand, fx.Node) else None
            if old is not None and new is not None:
                pairs.append((old, new))
        return dict(_strip_common_end(old, new) for old, new in pairs if old != new)


def call_shared(gm: fx.GraphModule, node: fx.Node, shared: SharedBody) -> None:
    """Makes a call of ``gm`` call a shared body, and deletes its captured body if it is unused."""
    (old,) = body_nodes(node)
    if not hasattr(gm, shared.identifier):
        gm.add_module(shared.identifier, shared.body)
    with gm.graph.inserting_before(node):
        new = gm.graph.get_attr(shared.identifier)
    new.meta = dict(old.meta)
    set_value(new, shared.body)
    node.args = (new, shared.identifier, *node.args[2:])
    if not old.users:
        gm.graph.erase_node(old)
        if not gm.graph.find_nodes(op="get_attr", target=old.target):
            gm.delete_submodule(str(old.target))


def fresh_results(shared: SharedBody) -> Any:
    """Returns values for the results of one more call, which are new tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, shared.results)


def inline_shared_bodies(gm: fx.GraphModule, *, called_once: bool = False) -> None:
    """Replaces calls of shared bodies by the ops of these bodies, in place.

    Needed where torch cannot trace a body: with operands of several dtypes under one identifier,
    in another autocast state than before, and for the backward of a body inside a body.

    Args:
        gm: The graph.
        called_once: Whether to inline only bodies with one call, as Dynamo does.
    """
    if has_shared_bodies(gm):
        (inline_single_use_invoke_subgraph if called_once else inline_invoke_subgraph)(gm)
        for module in graph_modules_in(gm):
            module.recompile()


def _operand_key(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value_key(value)
    return value_key(value), value.is_leaf, value._is_view()


def _weight_paths(gm: fx.GraphModule) -> Iterator[tuple[int, str]]:
    """Yields the paths of the modules that own the inputs of a graph, by ``id`` of their values.

    Relies on Dynamo passing these values to the bodies unchanged.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is not None:
            yield id(recorded_value(node)), plain_name(source.name).rpartition(".")[0]


def _strip_common_end(old: str, new: str) -> tuple[str, str]:
    """Returns the paths of two modules without the last components that are equal."""
    olds, news = old.split("."), new.split(".")
    # ``layers.0.norm`` and ``layers.1.norm`` differ in the layer. A renamed layer renames all
    # modules in it, also those that own no weight.
    while olds and news and olds[-1] == news[-1]:
        olds.pop()
        news.pop()
    return ".".join(olds), ".".join(news)


def _rename_stack(
    stack: Mapping[str, tuple[str, Any]], renames: Mapping[str, str]
) -> dict[str, tuple[str, Any]]:
    """Returns a module stack with the longest matching start of each module's path replaced.

    The keys of replaced entries are no ids of modules, so that ``module_stack`` reads the names.
    """
    renamed: dict[str, tuple[str, Any]] = {}
    for key, (name, cls) in stack.items():
        path = plain_name(name)
        starts = [old for old in renames if path == old or path.startswith(f"{old}.")]
        if starts:
            start = max(starts, key=len)
            new = renames[start] + path.removeprefix(start)
            renamed[f"{new}@{key}"] = new, cls
        else:
            renamed[key] = name, cls
    return renamed

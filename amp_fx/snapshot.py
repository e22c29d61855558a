"""Puts a graph back as Dynamo made it, for graphs that turn out not to be rewritable."""

from __future__ import annotations

import dataclasses

from torch import fx


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of the graphs of a module and of the graph modules inside it."""

    graphs: tuple[tuple[fx.GraphModule, fx.Graph], ...]

    @classmethod
    def take(cls, gm: fx.GraphModule) -> Snapshot:
        """Copies the graphs; values in ``meta`` are shared, the ``meta`` dicts are not."""
        modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
        return cls(tuple((module, _copy_graph(module.graph)) for module in modules))

    def restore(self) -> None:
        """Gives every module its copy; use a snapshot once."""
        for module, graph in self.graphs:
            module.graph = graph
            module.recompile()


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(owning_module=graph.owning_module, tracer_cls=graph._tracer_cls)
    env: dict[fx.Node, fx.Node] = {}
    output = copy.graph_copy(graph, env)
    for old, new in env.items():
        # Dynamo tells AOTAutograd an input's origin through an attribute of its node.
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    node = copy.output(output)
    node.meta = dict(graph.output_node().meta)
    return copy

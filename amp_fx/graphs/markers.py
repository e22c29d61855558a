"""Markers: nodes that enter and exit autocast regions when a graph runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.torch_private.autocast import enter_autocast, exit_autocast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

MARKERS = (enter_autocast, exit_autocast)


def enter_region(graph: fx.Graph, regions: Iterable[tuple[Any, ...]]) -> list[fx.Node]:
    """Adds and returns nodes that enter regions of ``torch.autocast``."""
    return [graph.call_function(enter_autocast, region) for region in regions]


def exit_region(graph: fx.Graph, enters: list[fx.Node]) -> list[fx.Node]:
    """Adds and returns the nodes that exit the regions of ``enter_region``."""
    # Regions nest, so the last one is exited first.
    return [graph.call_function(exit_autocast, (node,)) for node in reversed(enters)]


def surround(graph: fx.Graph, regions: Iterable[tuple[Any, ...]]) -> None:
    """Enters regions before the first op of a graph, and exits them after the last."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        enters = enter_region(graph, regions)
    with graph.inserting_before(graph.output_node()):
        exit_region(graph, enters)
    graph.lint()


def region_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Returns the arguments of a node that enters a region of ``torch.autocast``."""
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    bound = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return (
        bound["device_type"],
        bound.get("dtype"),
        bound.get("enabled", True),
        bound.get("cache_enabled"),
    )

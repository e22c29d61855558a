"""Graphs of AOTAutograd's kind, traced from functions, and their text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from amp_fx.weights.inputs import Candidates, Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import fx


def traced(program: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """Traces a function of tensors; the graph returns a tuple, as those of AOTAutograd."""

    def returns_tuple(*args: torch.Tensor) -> Any:
        result = program(*args)
        return result if isinstance(result, tuple) else (result,)

    names = program.__code__.co_varnames[: len(inputs)]
    gm = make_fx(returns_tuple, tracing_mode="fake")(*inputs)
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)
        node.target = node.name
    gm.recompile()
    return gm


def text(graph: fx.Graph) -> list[str]:
    """Returns one line per node."""
    lines = []
    for node in graph.nodes:
        args = ", ".join(str(map_arg(arg, str)) for arg in node.args)
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
        elif node.op == "call_function":
            name = str(node.target).removesuffix(".default")
            lines.append(f"{node.name} = {name}({args})")
        else:
            lines.append(f"{node.name} = {node.op}")
    return lines


def weights(*tensors: torch.Tensor | None, names: Sequence[str] = "abcdef") -> Candidates:
    """Returns the candidates of a graph with these weights as inputs; None is another input."""
    found = {i: Weight(names[i], t) for i, t in enumerate(tensors) if t is not None}
    return Candidates(found, {}, tuple(range(len(tensors))), frozenset(), False)


def computed(specs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Computes the values of specs, as the store does; aliases are the weights themselves."""
    values: list[Any] = []
    for spec in specs:
        own = tuple(args[i] for i in spec.positions)
        values += own if spec.is_alias else spec.evaluate(own)
    return values

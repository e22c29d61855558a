"""The first node of a captured graph whose value, or gradient, differs once it is compiled.

A part of a graph that ends with some node is compiled alone, and what it gives is compared with
what the same part gives op by op, which are the bits of eager autocast. Halving finds the shortest
part that differs; its last node is at fault. For gradients, parts that begin with some node are
compiled and differentiated. A part may be fused otherwise than the whole is: then the place is one
where a difference begins, if not the one where the program's does.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.backend.entry import called_in
from amp_fx.backend.inner import compile_inner
from amp_fx.backend.rewrite import Reporting, rewrite
from amp_fx.explanation.running import optimized
from amp_fx.graphs.bodies import with_attributes_as_inputs
from amp_fx.graphs.casts import inserted_cast
from amp_fx.graphs.markers import ENTERS, EXITS
from amp_fx.graphs.places import op_name, place_of
from amp_fx.numerics.equality import Difference, compare
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from amp_fx.options import Options
    from amp_fx.regions.module_stack import CompileFrame

    Region = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """A node of a captured graph.

    Attributes:
        stage: ``"forward"``, ``"backward"``, or ``"pass"`` where the graphs themselves differ.
        node: Its name in the graph.
        op: What it calls.
        module: Path of the module that it was captured in.
        source: Its line in the program: ``"model.py:12: y = x @ w"``.
        difference: How its value (or a gradient behind it) differs; None if not known.
    """

    stage: str
    node: str
    op: str
    module: str
    source: str
    difference: Difference | None = None

    def __str__(self) -> str:
        """A line."""
        where = f" in {self.module}" if self.module else ""
        stage = "the backward of " if self.stage == "backward" else ""
        source = f" ({self.source})" if self.source else ""
        how = f"; {self.difference}" if self.difference else ""
        return f"{stage}{self.op}{where}, node {self.node}{source}{how}"


@dataclasses.dataclass(frozen=True)
class Captured:
    """A rewritten graph of one call, and the inputs that it was called with."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    frame: CompileFrame
    has_grad: bool
    region: Region = no_autocast


def capture(
    program: Callable[..., Any], args: Any, kwargs: Any, options: Options, region: Region
) -> list[Captured]:
    """The graphs of one call, in the order of calls; a graph that is called twice is there twice.

    To be called in the region that the program is to be rewritten for. In another region than
    ``no_autocast`` the graphs are not rewritten.
    """
    found: list[Captured] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, attributes = with_attributes_as_inputs(gm)
        ours = dataclasses.replace(options, compiler="inductor", numerics=None)
        before = copy.deepcopy(gm.graph)
        rewritten = rewrite(gm, [*example_inputs, *attributes], ours, Reporting())
        made = rewritten.gm if region is no_autocast else fx.GraphModule(gm, before)

        def call(*given: Any) -> Any:
            inputs = (*given, *attributes)
            has_grad = torch.is_grad_enabled()
            found.append(Captured(made, copied(tuple(inputs)), rewritten.frame, has_grad, region))
            return made(*inputs)

        return called_in(region, call)

    optimized(backend)(program)(*args, **kwargs)
    return found


def first_difference(
    ours: Sequence[Captured], theirs: Sequence[Captured], options: Options, *, in_backward: bool
) -> Place | None:
    """The first node that differs."""
    if ours is not theirs:
        return next(filter(None, map(_first_of_two, ours, theirs)), None)
    searches = (_in_gradients,) if in_backward else (_in_values, _in_gradients)
    with no_autocast():
        for search in searches:
            for captured in ours:
                if found := search(captured, options):
                    return found
    return None


def _first_of_two(ours: Captured, theirs: Captured) -> Place | None:
    """The first node that has another value than the node of the same name in another graph."""
    expected, actual = _Values(theirs.gm), _Values(ours.gm)
    for values, captured in ((expected, theirs), (actual, ours)):
        torch.manual_seed(0)
        with torch.no_grad(), captured.region():
            values.run(*copied(captured.inputs))
    new = [node for node in ours.gm.graph.nodes if node.name in actual.found]
    for node in new:
        if node.name in expected.found:
            other = compare(node.name, expected.found[node.name], actual.found[node.name])
            if other is not None:
                added = _added(node, expected.found)
                return _place("pass", next(added, node), ours.frame, other)
    return None


def _added(node: fx.Node, known: Mapping[str, Any]) -> Iterator[fx.Node]:
    """The nodes before a node that another graph lacks; casts to its dtype are none of them."""
    for before in node.all_input_nodes:
        if before.name not in known:
            yield from _added(before, known)
            if inserted_cast(before) is None:
                yield before


class _Values(fx.Interpreter):
    """Runs a graph op by op, and keeps the tensors that its nodes give."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        torch.manual_seed(0)
        self.found: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op != "output":
            self.found[n.name] = value.detach().clone()
        return value


def _in_values(captured: Captured, options: Options) -> Place | None:
    nodes = _cuts(captured.gm.graph)
    values = _Values(captured.gm)
    with torch.no_grad():
        values.run(*copied(captured.inputs))
    seen: dict[int, Difference] = {}

    def differs(index: int) -> bool:
        gm, outputs = _until(captured.gm, nodes[index], values.found)
        expected = _called(gm, captured)
        actual = _called(_compile(gm, captured.inputs, options), captured)
        for name, left, right in zip(outputs, expected, actual, strict=True):
            if (other := compare(name, left, right)) is not None:
                seen[index] = other
                return True
        return False

    index = _first(len(nodes), differs)
    return None if index is None else _place("forward", nodes[index], captured.frame, seen[index])


def _in_gradients(captured: Captured, options: Options) -> Place | None:
    if not captured.has_grad:
        return None
    nodes = _cuts(captured.gm.graph)
    values = _Values(captured.gm)
    with torch.no_grad():
        values.run(*copied(captured.inputs))
    seen: dict[int, Difference] = {}

    def differs(index: int) -> bool:
        """Returns True if gradients differ in the part behind the last ``index`` nodes."""
        gm, inputs = _since(captured, nodes[len(nodes) - 1 - index], values.found)
        expected = _gradients(gm, inputs)
        actual = _gradients(_compile(gm, _leaves(inputs), options), inputs)
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            if left is None or right is None:
                continue
            if (other := compare(f"gradient {i}", left, right)) is not None:
                seen[index] = other
                return True
        return False

    index = _first(len(nodes), differs)
    if index is None:
        return None
    return _place("backward", nodes[len(nodes) - 1 - index], captured.frame, seen[index])


def _first(size: int, differs: Callable[[int], bool]) -> int | None:
    """An index at which something differs, and not at the one before; None if not at the last."""
    if not size or not differs(size - 1):
        return None
    low, high = -1, size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if differs(middle):
            high = middle
        else:
            low = middle
    return high


def _cuts(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that make something and stand in no opaque region."""
    depth, found = 0, []
    for node in graph.nodes:
        depth += (node.target in ENTERS) - (node.target in EXITS)
        if node.op not in ("placeholder", "output", "get_attr") and not depth:
            found.append(node)
    return found


def _until(
    gm: fx.GraphModule, last: fx.Node, known: dict[str, torch.Tensor]
) -> tuple[fx.GraphModule, list[str]]:
    """The part of a graph that ends with a node; it gives that and what is still read later."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    before: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        before[node] = None
        if node is last:
            break
    live = [n for n in before if n is last or any(user not in before for user in n.users)]
    live = [n for n in live if n.op != "placeholder" and _is_float(known.get(n.name))]
    graph.output(tuple(env[n] for n in live))
    return _plain_module(gm, graph), [n.name for n in live]


def _since(
    captured: Captured, first: fx.Node, known: dict[str, torch.Tensor]
) -> tuple[fx.GraphModule, list[Any]]:
    """The part of a graph that begins with a node, and its inputs."""
    nodes = list(captured.gm.graph.nodes)
    at = nodes.index(first)
    own = [n for n in nodes[at:] if n.op not in ("placeholder", "get_attr")]
    needed = dict.fromkeys(n for node in own for n in node.all_input_nodes if n not in own)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    placed = dict(zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs, strict=True))
    inputs = []
    for node in needed:
        if node.op == "get_attr":
            continue
        env[node] = graph.placeholder(node.name)
        value = placed[node] if node in placed else known[node.name]
        inputs.append(value)
    for node in needed:
        if node.op == "get_attr":
            env[node] = graph.node_copy(node)
    for node in own:
        if node.op == "output":
            kept = [n for n in pytree.tree_leaves(node.args) if isinstance(n, fx.Node)]
            graph.output(tuple(map_arg(n, env.__getitem__) for n in kept if n in env))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return _plain_module(captured.gm, graph), inputs


def _plain_module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A part of a graph as a module, without what Dynamo told of the whole."""
    graph.lint()
    return fx.GraphModule(gm, graph)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    own = fx.GraphModule(gm, _copy_of(gm.graph))
    return compile_inner(
        own, list(copied(tuple(inputs))), dataclasses.replace(options, fallback=False)
    )


def _copy_of(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _called(call: Callable[..., Any], captured: Captured) -> list[Any]:
    torch.manual_seed(0)
    with torch.set_grad_enabled(captured.has_grad):
        return [value.detach() for value in call(*copied(captured.inputs))]


def _gradients(call: Callable[..., Any], inputs: Sequence[Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    leaves = _leaves(inputs)
    with torch.enable_grad():
        outputs = [v for v in call(*leaves) if isinstance(v, torch.Tensor) and v.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(v.shape, generator=generator).to(v.device, v.dtype) for v in outputs]
    wanted = [leaf for leaf in leaves if _is_float(leaf)]
    if not outputs:
        return []
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))


def _leaves(inputs: Sequence[Any]) -> list[Any]:
    return [
        value.detach().clone().requires_grad_() if _is_float(value) else value for value in inputs
    ]


def copied(tree: Any) -> Any:
    """A copy of inputs, leaves again."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _place(stage: str, node: fx.Node, frame: CompileFrame, other: Difference | None) -> Place:
    place = place_of(node, frame)
    source = f"{place.file}:{place.line}: {place.code}" if place.file else ""
    return Place(stage, node.name, op_name(node), place.module, source, other)

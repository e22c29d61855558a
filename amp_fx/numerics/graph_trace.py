"""Traces compiled programs: each graph also returns the values of its nodes.

The forward and backward graphs of AOTAutograd have the ops of eager code. The inner compiler of the
options compiles them with additional outputs. Inductor's kernels then also write values that they
would keep in registers, but compute with the unrounded values as before. If inductor fuses these
graphs otherwise than the program's, they round otherwise.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from amp_fx.backend.compilers import compile_inner
from amp_fx.backend.entry import called_in
from amp_fx.backend.rewrite import rewrite
from amp_fx.explanation.running import optimized
from amp_fx.graphs.bodies import with_attributes_as_inputs
from amp_fx.graphs.locations import NodeLocation, location_of
from amp_fx.numerics.trace import is_traced, op_label, traced_results
from amp_fx.observe.ops import facts_of
from amp_fx.regions.module_stack import compile_frame
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.aot_autograd import aot_autograd, make_boxed_func
from amp_fx.torch_private.higher_order import let_saved_rng_states_be_traced
from amp_fx.torch_private.modes import no_dispatch_modes
from amp_fx.torch_private.ops import OpOverload
from amp_fx.weights.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.numerics.trace import Trace
    from amp_fx.options import Options
    from amp_fx.regions.module_stack import CompileFrame


def traced(
    program: Callable[..., Any],
    trace: Trace,
    options: Options,
    *,
    is_rewritten: bool = True,
    **settings: Any,
) -> Callable[..., Any]:
    """Compiles a program whose calls add the values of its graphs to a trace.

    Args:
        program: A module or a function.
        trace: The trace.
        options: The options of the backend. Values of weights are not cached.
        is_rewritten: True if amp_fx inserts casts; else autocast casts while AOTAutograd traces.
        settings: Other arguments of ``torch._dynamo.optimize``, such as ``dynamic``.
    """
    let_saved_rng_states_be_traced()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not is_rewritten:
            compiler = _compiler(trace, options, compile_frame(gm))
            return compiler(gm, example_inputs)  # type: ignore[no-any-return]
        gm, attributes = with_attributes_as_inputs(gm)
        given = [*example_inputs, *attributes]
        found = rewrite(gm, Inputs.of(gm, given), options)
        with no_autocast():
            compiled = _compiler(trace, options, found.frame)(found.gm, given)
        return called_in(no_autocast, lambda *args: compiled(*args, *attributes))

    found: Callable[..., Any] = optimized(backend, **settings)(program)
    return found


def _compiler(trace: Trace, options: Options, frame: CompileFrame) -> Callable[..., Any]:
    inside = functools.partial(_compile, trace, options, frame)
    backward = functools.partial(inside, is_backward=True)
    compiler: Callable[..., Any] = aot_autograd(fw_compiler=inside, bw_compiler=backward)
    return compiler


class _Value(NamedTuple):
    """An additional output of a graph.

    Attributes:
        place: The module and the line.
        op: The name of the op.
        inputs: The origins of the op's inputs: other values and inputs of the graph.
    """

    place: NodeLocation
    op: str
    inputs: tuple[_Origin, ...]


_Origin = tuple[str, int]
"""``("value", 3)`` or ``("input", 0)``."""


def _compile(
    trace: Trace,
    options: Options,
    frame: CompileFrame,
    gm: fx.GraphModule,
    _: Sequence[Any],
    *,
    is_backward: bool = False,
) -> Callable[..., Any]:
    stage = "backward" if is_backward else "forward"
    values, outputs = _with_values(gm, frame)
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        makers = [trace.makers([a] if isinstance(a, torch.Tensor) else []) for a in args]
        if not compiled:  # the inputs of a backward are not known earlier
            with no_dispatch_modes():  # AOTAutograd runs graphs under a dispatch mode
                compiled.append(compile_inner(gm, args, options))
        results = compiled[0](*args)
        added: list[tuple[int, ...]] = []

        def found(origins: tuple[_Origin, ...]) -> tuple[int, ...]:
            numbers = (added[n] if kind == "value" else makers[n] for kind, n in origins)
            return tuple(dict.fromkeys(number for several in numbers for number in several))

        for value, result in zip(values, results[len(outputs) :], strict=True):
            has_result = result is not None  # a kernel omits gradients that nothing needs
            added.append((len(trace.ops),) * has_result)
            if has_result:
                trace.add(stage, value.place, value.op, result, found(value.inputs))
        for result, origins in zip(results, outputs, strict=False):
            if isinstance(result, torch.Tensor):
                trace.mark(result, found(origins))
        return results[: len(outputs)]

    return make_boxed_func(call)


def _with_values(
    gm: fx.GraphModule, frame: CompileFrame
) -> tuple[list[_Value], list[tuple[_Origin, ...]]]:
    """Adds the values of nodes to the outputs of a graph, and describes them and the outputs."""
    values: list[_Value] = []
    nodes: list[fx.Node] = []
    origins: dict[fx.Node, tuple[_Origin, ...]] = {}
    for node in list(gm.graph.nodes):
        node.meta.pop("recompute", None)  # the graph recomputes already what a checkpoint asks for
        if node.op == "placeholder":
            origins[node] = (("input", len(origins)),)
            continue
        inputs = tuple(dict.fromkeys(o for n in node.all_input_nodes for o in origins.get(n, ())))
        origins[node] = inputs
        if not isinstance(node.target, OpOverload) or facts_of(node.target).is_view:
            continue
        made = _tensors_of(gm.graph, node, node.target)
        if made:
            origins[node] = tuple(("value", len(values) + i) for i in range(len(made)))
        for part in made:
            nodes.append(part)
            values.append(_Value(location_of(node, frame), op_label(node.target), inputs))
    output = gm.graph.output_node()
    given = list(output.args[0])  # type: ignore[arg-type]
    output.args = ((*given, *nodes),)
    gm.recompile()
    leaves = (n if isinstance(n, fx.Node) else None for n in pytree.tree_leaves(given))
    return values, [() if n is None else origins.get(n, ()) for n in leaves]


def _tensors_of(graph: fx.Graph, node: fx.Node, op: OpOverload) -> list[fx.Node]:
    """Returns nodes with the floating-point results of a node."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return [node] if is_traced(value) else []
    found = []
    last = node
    for position, part in enumerate(traced_results(op, value)):
        if is_traced(part):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (node, position))
            last.meta["val"] = part
            found.append(last)
    return found

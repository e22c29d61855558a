"""Runs the graphs of a step under a policy, and tells a recorder where each op is.

A policy acts in compiled code only, and Dynamo captures nothing while a mode is active. So the step
is compiled first. Its rewritten graphs run op by op, and each enters the recorder itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.entry import called_in
from amp_fx.backend.rewrite import rewrite
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.running import optimized
from amp_fx.graphs.bodies import graph_modules_in, graphs_in, with_attributes_as_inputs
from amp_fx.graphs.locations import is_library, lines_of, location_of
from amp_fx.graphs.metadata import DECISIONS
from amp_fx.numerics.float8_products import Float8Twin
from amp_fx.observe.places import EAGER_FORMS
from amp_fx.options import Options
from amp_fx.policies.float8 import float8_product, float8_weight
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private.dynamo import counters
from amp_fx.weights.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.observe.recorder import Recorder
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame


class CompiledStep:
    """A step compiled under a policy, whose graphs run under a recorder.

    Attributes:
        recorder: The recorder of the next run.
        num_graphs: The number of captured graphs.
        breaks: The reasons of graph breaks; the code there runs eagerly and unobserved.
    """

    def __init__(self, step: Callable[..., Any], policy: Policy, recorder: Recorder) -> None:
        self.recorder = recorder
        self.num_graphs = 0
        self.breaks: Counter[str] = Counter()
        self._options = Options.parse(
            {"compiler": "eager", "policy": policy, "weight_cache": False}
        )
        self._call = optimized(self._backend)(step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            UnsupportedError: Dynamo captured nothing, so that the policy has no effect.
        """
        before = Counter(counters["graph_break"])
        results = self._call(*args, **kwargs)
        self.breaks += Counter(counters["graph_break"]) - before
        if not self.num_graphs:
            raise UnsupportedError(
                "policies apply to compiled code only, and Dynamo captured no graph of the step"
            )
        return results

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        gm, attributes = with_attributes_as_inputs(gm)
        inputs = Inputs.of(gm, [*example_inputs, *attributes])
        found = rewrite(gm, inputs, self._options)
        for graph in graphs_in(found.gm):
            self._tell_places(graph, found.frame)
        for module in graph_modules_in(found.gm):
            module.recompile()
        run = called_in(lambda: self.recorder, lambda *args: found.gm(*args, *attributes))
        return called_in(no_autocast, run)

    def _tell_places(self, graph: fx.Graph, frame: CompileFrame) -> None:
        """Adds calls that tell the recorder the place of the next op."""
        for node in list(graph.nodes):
            if node.op == "output":
                with graph.inserting_before(node):
                    graph.call_function(self._leave)
            if node.op not in ("call_function", "call_method"):
                continue
            target: Any = node.target
            place = _location_of(node, frame), _function_of(node)
            with graph.inserting_before(node):
                graph.call_function(self._entering(*place))
            node.target = EAGER_FORMS.get(str(target), target)
            if target is float8_weight:
                node.target = self._run_float8_weight
            elif target is float8_product:
                weight = _weight_of(node)
                node.target, node.args = self._run_float8_product, (weight, *node.args)

    def _entering(self, location: NodeLocation, function: Any) -> Callable[[], None]:
        def tell_place() -> None:
            self.recorder.places.in_graph = location, function

        return tell_place

    def _leave(self) -> None:
        self.recorder.places.in_graph = None

    def _run_float8_weight(self, *args: Any) -> Any:
        with self.recorder.paused():
            return float8_weight(*args)

    def _run_float8_product(self, weight: torch.Tensor, *args: Any) -> Any:
        run = functools.partial(float8_product, *args)
        for sink in self.recorder.sinks:
            if isinstance(sink, Float8Twin):
                return sink.run_float8(run, args[0], weight, args[2], args[-1])
        return run()


def _location_of(node: fx.Node, frame: CompileFrame) -> NodeLocation:
    """Returns the module of a node, and the line of the program, not of a function of torch."""
    location = location_of(node, frame)
    lines = [line for line in lines_of(node) if not is_library(line.file)]
    if not lines:
        return location
    return location._replace(file=lines[-1].file, line=lines[-1].number, code=lines[-1].code)


def _function_of(node: fx.Node) -> Any:
    """Returns what the node calls; for a product in float8, the op that the program has there."""
    if node.target is float8_product:
        name = DECISIONS.of(node)[0].op.removeprefix("aten::")
        return getattr(torch.ops.aten, name.partition(".")[0])
    is_method = isinstance(node.target, str)
    return getattr(torch.Tensor, str(node.target), None) if is_method else node.target


def _weight_of(product: fx.Node) -> fx.Node:
    """Returns the weight of a product in float8, which is an argument if it has a gradient."""
    weight, data = product.args[1], product.args[3]
    with contextlib.suppress(IndexError, AttributeError):
        return weight or data.args[0].args[0]  # type: ignore[union-attr,return-value]
    raise UnsupportedError("a weight in float8 without a gradient is quantized outside of a body")

"""Watches the backend rewrite graphs, and notes what became of every cast."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.freezing import values_when_frozen, weights_to_freeze
from amp_fx.explanation.lowered import lowered_graphs
from amp_fx.explanation.records import PassRecord
from amp_fx.graphs.casts import Cast, inserted_cast
from amp_fx.graphs.collectives import has_collectives
from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import plain_inputs, recorded_value, tensors_in
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.weights.kept_cast import kept_cast
from amp_fx.weights.kept_inputs import example_copies, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.explanation.lowered import LoweredGraph
    from amp_fx.options import Options
    from amp_fx.passes.base import PassReport
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState
    from amp_fx.weights.recipes import Recipe

log = logging.getLogger(__name__)


@dataclasses.dataclass
class SeenCast:
    """A cast node, as it was when a pass had just put it in.

    Attributes:
        node: The node; it may have been erased since.
        cast: Its record.
        source: What it cast.
        users: What took it.
        removed_by: The pass that erased it, or ``""``.
    """

    node: fx.Node
    cast: Cast
    source: fx.Node
    users: tuple[fx.Node, ...]
    removed_by: str = ""


@dataclasses.dataclass
class SeenGraph:
    """One graph on its way through the backend.

    Attributes:
        captured: As Dynamo made it.
        state: The autocast state where it begins.
        frame: The modules around the frame that it was captured from.
        rewritten: As the inner compiler would get it.
        casts: All casts that were put in.
        counts: What the passes counted.
        fallback: Why it was not rewritten.
        backward: The graph that AOTAutograd derives from it, if asked for.
        kept_values: What is kept where the graph is frozen: fake tensors by their recipes.
        weights: Positions of the inputs that they are made of.
        passes: What each pass did to the bytes of casts.
        lower: Gives the graphs that inductor would get, if they were asked for or send anything.
    """

    captured: fx.GraphModule
    state: AutocastState
    frame: CompileFrame = NO_FRAME
    rewritten: fx.GraphModule | None = None
    casts: dict[fx.Node, SeenCast] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    fallback: str = ""
    backward: fx.GraphModule | None = None
    kept_values: Mapping[Recipe, torch.Tensor] = dataclasses.field(default_factory=dict)
    weights: tuple[int, ...] = ()
    passes: list[PassRecord] = dataclasses.field(default_factory=list)
    lower: Callable[[], tuple[LoweredGraph, ...]] | None = None


class GraphRecorder:
    """Takes down one graph while the backend rewrites it (``passes.base.Observer``).

    Args:
        seen: What is filled in.
        wants_backward: Whether the backward graph is derived as well.
        options: What the graph would be compiled with.
        is_imagined: Whether the CPU stands for a device.
        wants_kernels: Whether inductor is asked for its kernels.
    """

    def __init__(
        self,
        seen: SeenGraph,
        *,
        wants_backward: bool,
        options: Options,
        is_imagined: bool,
        wants_kernels: bool,
    ) -> None:
        self.seen = seen
        self.wants_backward = wants_backward
        self.options = options
        self.is_imagined = is_imagined
        self.wants_kernels = wants_kernels

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """Finds casts that came or went, and their bytes; passes edit bodies too."""
        self._find_casts(report, gm)
        bytes_cast = sum(map(_bytes_per_call, self.seen.casts))
        before = self.seen.passes[-1].bytes_cast if self.seen.passes else 0
        counts = tuple(sorted(report.counts.items()))
        self.seen.passes.append(PassRecord(report.name, counts, bytes_cast - before, bytes_cast))

    def _find_casts(self, report: PassReport, gm: fx.GraphModule) -> None:
        self.seen.counts.update(report.counts)
        for seen in self.seen.casts.values():
            if seen.node._erased and not seen.removed_by:
                seen.removed_by = report.name
        for graph in graphs_in(gm):
            for node in graph.nodes:
                cast = inserted_cast(node)
                if cast is not None and node not in self.seen.casts:
                    source, users = node.all_input_nodes[0], tuple(node.users)
                    self.seen.casts[node] = SeenCast(node, cast, source, users)

    def fell_back(self, error: Exception, graph: fx.Graph) -> None:  # noqa: ARG002
        """Forgets what passes did before one failed: the graph stays as captured."""
        self.seen.fallback = str(error)
        self.seen.casts.clear()
        self.seen.passes.clear()
        self.seen.counts.clear()

    def rewritten(self, reports: Sequence[PassReport]) -> None:
        """Nothing is counted: nothing is compiled."""

    def finish(self, found: Rewritten, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keeps the rewritten graph.

        Returns:
            What Dynamo calls with ``example_inputs``: it runs the graph op by op, with empty
            copies of weights.
        """
        gm = found.gm
        self.seen.rewritten, self.seen.state, self.seen.frame = gm, found.state, found.frame
        added = example_copies(gm, example_inputs)
        if self.wants_backward:
            self.seen.backward = derive_backward(gm, [*example_inputs, *added])
        if self.wants_backward or self.wants_kernels or has_collectives(gm):
            self.seen.lower = functools.partial(
                lowered_graphs,
                copy_graph_module(gm),
                tuple(example_inputs),
                self.options,
                is_grad_enabled=torch.is_grad_enabled(),
                wants_kernels=self.wants_kernels,
            )
        if not self.is_imagined:
            self._note_kept_values(found, example_inputs, self.options)
        slots = slots_of(gm.graph.find_nodes(op="placeholder"))

        def run(*args: Any) -> Any:
            copies = tensors_in([slot.make((args[slot.source_index].detach(),)) for slot in slots])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Dynamo's capture has warned of them
                assert self.seen.rewritten is not None
                return self.seen.rewritten(*args, *copies)

        return run

    def _note_kept_values(
        self, found: Rewritten, example_inputs: Sequence[Any], options: Options
    ) -> None:
        """Finds out what is kept besides casts, as ``backend`` does when it compiles."""
        plain = plain_inputs(example_inputs)
        weights = tuple(
            weights_to_freeze(self.seen.captured, found, example_inputs, options, plain=plain)
        )
        if not weights:
            return
        try:
            values = values_when_frozen(found.variant(), example_inputs, weights, options)
        except Exception:  # such a graph is not frozen
            log.debug("not frozen", exc_info=True)
            return
        self.seen.kept_values, self.seen.weights = values, weights


def _bytes_per_call(cast: fx.Node) -> int:
    """What a cast reads and writes on every call: nothing if it went, or is kept."""
    if cast._erased or cast.target is kept_cast:
        return 0
    values = tensors_in([recorded_value(node) for node in (cast.all_input_nodes[0], cast)])
    return sum(map(num_bytes, values))


def graphs_in(gm: fx.GraphModule) -> list[fx.Graph]:
    """A graph and the graphs of bodies inside it."""
    return [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]


def derive_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
    """The backward that AOTAutograd derives from a rewritten graph; None if there is none.

    Relies on AOTAutograd handing the backward to its compiler right away where
    ``force_non_lazy_backward_lowering`` is set.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[fx.GraphModule] = []

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    with config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        compiler(copy_graph_module(gm), list(inputs))
    return found[0] if found else None

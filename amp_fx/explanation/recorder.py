"""Observes how the backend rewrites graphs, and creates records of graphs and casts."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx import csrc
from amp_fx.backend.compilers import plan_graphs
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.disk_caches import without_autograd_cache
from amp_fx.backend.lower import find_cached
from amp_fx.csrc import build
from amp_fx.dtypes import dtype_name
from amp_fx.explanation.reading import FlopMeter, GraphReader, kind_of
from amp_fx.explanation.records import (
    CastRecord,
    GraphRecord,
    KeptValueRecord,
    OpaqueRecord,
    WeightRecord,
)
from amp_fx.graphs.bodies import copy_graph_module, graphs_in
from amp_fx.graphs.casts import CONVERT, inserted_cast
from amp_fx.graphs.locations import input_path, module_types
from amp_fx.graphs.metadata import CAST, IS_CACHED, VALUE
from amp_fx.graphs.reasons import clean_reason, region_names
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import (
    detect_fake_mode,
    recorded_value,
    remember_captured,
    storage_id,
    value_of,
)
from amp_fx.passes.low_reads import low_reads
from amp_fx.policies.calls import TO_COPY
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.weights.aliases import viewed_by
from amp_fx.weights.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amp_fx.backend.lower import Caching
    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.explanation.records import NodeRecord
    from amp_fx.graphs.records import Cast
    from amp_fx.options import Options
    from amp_fx.passes.base import PassReport
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.weights.plan import CachePlan


log = logging.getLogger(__name__)


@dataclasses.dataclass
class SeenCast:
    """A cast node, with its source and users when a pass inserted it."""

    node: fx.Node
    cast: Cast
    source: fx.Node
    users: tuple[fx.Node, ...]
    removed_by: str = ""


@dataclasses.dataclass
class SeenGraph:
    """One graph in the backend.

    Attributes:
        captured: The graph that Dynamo captured.
        state: The autocast state at the start of the graph.
        frame: The modules around the captured frame.
        rewritten: The graph that the inner compiler would receive.
        casts: All inserted casts.
        counts: Counts of the passes.
        fallback: The reason why the graph was not rewritten, or empty.
        backward: The graph that AOTAutograd derives, if requested.
        plans: What the graphs of AOTAutograd cache; empty before ``find_cached_values``.
        uncached: For the name of each weight without a cached value, the reason.
        find_cached_values: Sets ``plans`` and marks cached casts; None if nothing is cached.
    """

    captured: fx.GraphModule
    state: AutocastState
    frame: CompileFrame = NO_FRAME
    rewritten: fx.GraphModule | None = None
    casts: dict[fx.Node, SeenCast] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    fallback: str = ""
    backward: fx.GraphModule | None = None
    plans: tuple[CachePlan, ...] = ()
    uncached: Mapping[str, str] = dataclasses.field(default_factory=dict)
    find_cached_values: Callable[[], None] | None = None


@dataclasses.dataclass(eq=False)
class GraphRecorder:
    """Observer that records one graph while the backend rewrites it (``passes.base.Observer``)."""

    seen: SeenGraph
    _: dataclasses.KW_ONLY
    wants_backward: bool
    options: Options
    is_imagined: bool

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """Records the casts that a pass inserted or removed, including those in bodies."""
        self.seen.counts.update(report.counts)
        for entry in self.seen.casts.values():
            if entry.node._erased and not entry.removed_by:
                entry.removed_by = report.name
        for graph in graphs_in(gm):
            for node in graph.nodes:
                cast = inserted_cast(node)
                if cast is not None and node not in self.seen.casts:
                    source, users = node.all_input_nodes[0], tuple(node.users)
                    self.seen.casts[node] = SeenCast(node, cast, source, users)

    def fell_back(
        self,
        error: Exception,
        graph: fx.Graph,  # noqa: ARG002
        frame: CompileFrame,  # noqa: ARG002
    ) -> None:
        """Discards the records, because the captured graph runs without changes."""
        self.seen.fallback = str(error)
        self.seen.casts.clear()
        self.seen.counts.clear()

    def rewritten(self, reports: Sequence[PassReport]) -> None:
        """Does nothing, because nothing is compiled."""

    def finish(self, result: Rewritten, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Records the rewritten graph.

        Returns:
            A function for Dynamo that runs the graph op by op.
        """
        gm = result.gm
        self.seen.rewritten, self.seen.state, self.seen.frame = gm, result.state, result.frame
        cache = self._cache(result, example_inputs)
        if self.wants_backward:
            self.seen.backward = derive_backward(gm, list(example_inputs), cache)
        if cache is not None and not cache.is_on():
            self.seen.uncached = cache.why_off().uncached
        elif cache is not None:
            self.seen.find_cached_values = functools.partial(
                self._find_cached_values,
                cache,
                tuple(example_inputs),
                is_grad_enabled=torch.is_grad_enabled(),
            )

        def run(*args: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Dynamo has already issued them
                assert self.seen.rewritten is not None
                return self.seen.rewritten(*args)

        return run

    def _cache(self, result: Rewritten, inputs: Sequence[Any]) -> Caching | None:
        """Returns the backend's decisions on caching, without building ``watch.cpp``.

        If the CPU represents an accelerator, the rules of the accelerator apply.
        """
        options = self.options
        if self.is_imagined:
            options = dataclasses.replace(options, freezing=False)
        captured = Inputs.of(self.seen.captured, inputs)
        return find_cached(captured, result, options, can_watch=can_watch)

    def _find_cached_values(
        self, cache: Caching, inputs: Sequence[Any], *, is_grad_enabled: bool
    ) -> None:
        """Finds the values that the backend would cache, and marks their casts.

        Must be called after Dynamo has finished: inductor's patterns create symbols for sizes, and
        Dynamo would create guards for these symbols.
        """
        seen = self.seen
        assert seen.rewritten is not None
        try:
            with no_autocast(), torch.set_grad_enabled(is_grad_enabled):
                seen.plans = tuple(plan_graphs(copy_graph_module(seen.rewritten), inputs, cache))
        except Exception:  # the backend caches nothing for such a graph
            log.debug("could not determine cached values", exc_info=True)
            return
        seen.uncached = {n: why for plan in seen.plans for n, why in plan.uncached.items()}
        placeholders = seen.rewritten.graph.find_nodes(op="placeholder")
        cached = {
            (storage_id(value_of(placeholders[position])), dtype)
            for plan in seen.plans
            for spec in plan.computed
            for position, dtype in spec.casts()
        }
        num_cached = 0
        for node, entry in seen.casts.items():
            if node._erased or entry.removed_by == "hoist_casts":
                continue
            source = value_of(node.all_input_nodes[0])
            if (storage_id(source), entry.cast.dtype) in cached:
                IS_CACHED.put(node, True)
                num_cached += 1
        if num_cached:
            seen.counts["weight_casts_kept"] += num_cached


def can_watch() -> bool:
    """Returns True if ``watch.cpp`` is built or can be built."""
    is_built = build.find("amp_fx_watch", csrc.SOURCE) is not None
    return not csrc.why_off() and (is_built or has_cpp_compiler())


def derive_backward(
    gm: fx.GraphModule, inputs: Sequence[Any], cache: Caching | None
) -> fx.GraphModule | None:
    """Returns the backward that AOTAutograd derives from a rewritten graph, or None."""
    from amp_fx.torch_private.aot_autograd import (
        aot_autograd,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )

    backwards: list[fx.GraphModule] = []

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        backwards.append(graph)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition if cache is None else cache.partition,
    )
    # Relies on this setting, which makes AOTAutograd compile the backward after the forward.
    with without_autograd_cache(force_non_lazy_backward_lowering=True):
        compiler(copy_graph_module(gm), list(inputs))
    return backwards[0] if backwards else None


def read_graphs(seen: Iterable[SeenGraph], device: str | None) -> tuple[GraphRecord, ...]:
    """Returns records of all graphs; each forward is followed by its backward."""
    records: list[GraphRecord] = []
    for index, graph in enumerate(seen):
        if graph.find_cached_values is not None:
            graph.find_cached_values()
        records.append(_read_forward(index, graph, device))
        if graph.backward is not None:
            records.append(_read_backward(index, graph, device))
    return tuple(records)


def _read_forward(index: int, seen: SeenGraph, device: str | None) -> GraphRecord:
    assert seen.rewritten is not None
    remember_captured(seen.captured.graph)
    meter = FlopMeter(detect_fake_mode(seen.captured.graph))
    before = GraphReader(seen.captured, seen.state, seen.frame, device=device)
    after = GraphReader(
        seen.rewritten, seen.state, seen.frame, device=device, meter=meter, fallback=seen.fallback
    )
    nodes = after.read()
    reason: Any = seen.captured.compile_subgraph_reason
    stack = reason.user_stack if reason.graph_break else ()
    return GraphRecord(
        index=index,
        stage="forward",
        autocast=_regions(seen, device),
        nodes=nodes,
        before=before.read(),
        casts=tuple(_forward_casts(seen, after)),
        opaque=opaque_records(nodes),
        weights=tuple(weights_of(seen)),
        counts=tuple(sorted(seen.counts.items())),
        modules=tuple(module_types(seen.captured, before.frame).items()),
        fallback=seen.fallback,
        break_reason=first_lines(str(reason.reason)) if reason.graph_break else "",
        break_at=f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "",
        kept_values=tuple(_kept_values(seen, after)),
        uncached=tuple(seen.uncached.items()),
    )


def _kept_values(seen: SeenGraph, reader: GraphReader) -> Iterable[KeptValueRecord]:
    assert seen.rewritten is not None
    placeholders = seen.rewritten.graph.find_nodes(op="placeholder")
    paths = [input_path(node, reader.frame) for node in placeholders]
    for spec in [spec for plan in seen.plans for spec in plan.computed]:
        for output in spec.outputs:
            if viewed_by(output).op != "placeholder":  # a view of a weight takes no memory
                value = VALUE.of(output)
                yield KeptValueRecord(
                    weights=tuple(paths[i] for i in spec.positions),
                    ops=spec.ops,
                    dtype=dtype_name(value.dtype),
                    shape=tuple(value.shape),
                    num_bytes=num_bytes(value),
                )


def first_lines(reason: str) -> str:
    """Returns the first line of a message of Dynamo, and its explanation, as one line."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    parts = [*lines[:1], *(line for line in lines[1:] if line.startswith("Explanation:"))]
    if "RNN, GRU, or LSTM" in reason:
        parts.append("Set torch._dynamo.config.allow_rnn = True to capture them.")
    return " ".join(parts)


def _regions(seen: SeenGraph, device: str | None) -> tuple[str, ...]:
    names = region_names(seen.state)
    return tuple(n.replace("cpu ", f"{device} ") for n in names) if device else names


def _read_backward(index: int, seen: SeenGraph, device: str | None) -> GraphRecord:
    assert seen.backward is not None
    gm = seen.backward
    remember_captured(gm.graph)
    meter = FlopMeter(detect_fake_mode(gm.graph))
    reader = GraphReader(gm, seen.state, seen.frame, device=device, meter=meter)
    nodes = reader.read()
    return GraphRecord(
        index=index,
        stage="backward",
        autocast=_regions(seen, device),
        nodes=nodes,
        casts=tuple(cast_record(n, n.all_input_nodes[0], reader, "backward") for n in _casts(gm)),
        modules=tuple(module_types(gm, reader.frame).items()),
    )


_CASTS = (TO_COPY, CONVERT)


def _casts(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes of a backward that change the dtype of a floating-point tensor."""
    nodes = [node for node in gm.graph.nodes if node.target in _CASTS]
    values = [(n, recorded_value(n.all_input_nodes[0]), recorded_value(n)) for n in nodes]
    return [n for n, old, new in values if old.is_floating_point() and old.dtype != new.dtype]


def opaque_records(nodes: Iterable[NodeRecord]) -> tuple[OpaqueRecord, ...]:
    """Returns records of the opaque nodes among the nodes of a graph."""
    opaque = [node for node in nodes if node.kind == "opaque"]
    return tuple(OpaqueRecord(n.name, n.op, n.module, n.reason) for n in opaque)


def weights_of(seen: SeenGraph) -> Iterable[WeightRecord]:
    """Yields records of the weights that a forward graph reads."""
    assert seen.rewritten is not None
    reads = {} if seen.fallback else low_reads(seen.rewritten)
    for node in seen.rewritten.graph.nodes:
        value = recorded_value(node)
        if kind_of(node) == "weight" and isinstance(value, torch.Tensor):
            read = reads.get(node)
            yield WeightRecord(
                path=input_path(node, seen.frame),
                dtype=dtype_name(value.dtype),
                num_bytes=num_bytes(value),
                low_dtype=dtype_name(read.dtype) if read is not None else "",
                is_one_cast=read is not None and read.is_one_cast,
            )


def _forward_casts(seen: SeenGraph, reader: GraphReader) -> Iterable[CastRecord]:
    for entry in seen.casts.values():
        if entry.removed_by == "hoist_casts":
            continue  # another cast replaced it outside of the body
        state, removed_by = "inserted", ""
        if not entry.node._erased and IS_CACHED.is_on(entry.node):
            state = "kept"
        elif entry.removed_by:
            state, removed_by = "removed", _why_removed(entry, seen, reader)
        wanted_by = clean_reason(entry.cast.reason)
        record = cast_record(entry.node, entry.source, reader, wanted_by, state, removed_by)
        yield dataclasses.replace(record, consumers=reader.names_of(list(entry.users)))


def _why_removed(entry: SeenCast, seen: SeenGraph, reader: GraphReader) -> str:
    for other in seen.casts.values():
        is_same = other.source is entry.source and other.cast.dtype == entry.cast.dtype
        if is_same and other is not entry and not other.removed_by:
            return f"shared with {_name(other.node, reader)}"
    if entry.removed_by == "quantize_products":
        return "the weight is quantized to float8 instead"
    if entry.removed_by not in ("fold_casts", "hoist_casts"):
        return f"removed by {entry.removed_by}"
    return f"round trip: the value was {dtype_name(entry.cast.dtype)} before"


def _name(node: fx.Node, reader: GraphReader) -> str:
    return next(iter(reader.names.get(node, ())), node.name)


def cast_record(
    node: fx.Node,
    source: fx.Node,
    reader: GraphReader,
    wanted_by: str,
    state: str = "inserted",
    removed_by: str = "",
) -> CastRecord:
    """Returns the record of a cast node."""
    old, new = recorded_value(source), recorded_value(node)
    return CastRecord(
        name=_name(node, reader),
        source=_name(source, reader),
        from_dtype=dtype_name(old.dtype),
        to_dtype=dtype_name(new.dtype),
        wanted_by=wanted_by,
        state=state,
        removed_by=removed_by,
        weight=input_path(source, reader.frame) if kind_of(source) == "weight" else "",
        consumers=reader.names_of(list(node.users)),
        bytes_read=num_bytes(old),
        bytes_written=num_bytes(new),
    )


def as_record(gm: fx.GraphModule) -> GraphRecord:
    """Returns the record of any FX graph whose nodes have values."""
    state = AutocastState.ambient()
    reader = GraphReader(gm, state, NO_FRAME)
    nodes = reader.read()
    casts = [n for n in gm.graph.nodes if CAST.is_on(n)]
    return GraphRecord(
        index=0,
        stage="forward",
        autocast=region_names(state),
        nodes=nodes,
        casts=tuple(cast_record(n, n.all_input_nodes[0], reader, "") for n in casts),
        opaque=opaque_records(nodes),
        modules=tuple(module_types(gm, reader.frame).items()),
    )

"""Turns what a recorder saw of each graph into a graph record."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.lowered import kernels_of, saved_for_backward, sent_by
from amp_fx.explanation.reading import GraphReader, kind_of
from amp_fx.explanation.reasons import clean_reason, region_names
from amp_fx.explanation.records import (
    CastRecord,
    GraphRecord,
    IslandRecord,
    KeptValueRecord,
    WeightRecord,
)
from amp_fx.explanation.work import WorkMeter
from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.metadata import CAST
from amp_fx.graphs.places import input_path, module_types
from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import detect_fake_mode, recorded_value, remember_captured
from amp_fx.passes.low_reads import low_reads
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.regions.state import AutocastState
from amp_fx.weights.kept_cast import kept_cast
from amp_fx.weights.recipes import ops_of, sources_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from amp_fx.explanation.lowered import LoweredGraph
    from amp_fx.explanation.recorder import SeenCast, SeenGraph
    from amp_fx.explanation.records import NodeRecord


def read_graphs(seen: Iterable[SeenGraph], device: str | None) -> tuple[GraphRecord, ...]:
    """All graphs, forwards each followed by its backward.

    Args:
        seen: What the recorder saw.
        device: What the CPU stands for; None if it is itself.
    """
    found: list[GraphRecord] = []
    for index, graph in enumerate(seen):
        lowered = graph.lower() if graph.lower is not None else ()
        found.append(_read_forward(index, graph, lowered, device))
        if graph.backward is not None:
            found.append(_read_backward(index, graph, lowered, device))
    return tuple(found)


def _read_forward(
    index: int, seen: SeenGraph, lowered: Sequence[LoweredGraph], device: str | None
) -> GraphRecord:
    assert seen.rewritten is not None
    remember_captured(seen.captured.graph)
    meter = WorkMeter(detect_fake_mode(seen.captured.graph))
    before = GraphReader(seen.captured, seen.state, seen.frame, device=device)
    after = GraphReader(
        seen.rewritten, seen.state, seen.frame, device=device, meter=meter, fallback=seen.fallback
    )
    before_records = before.read()
    nodes = after.read()
    reason: Any = seen.captured.compile_subgraph_reason
    stack = reason.user_stack if reason.graph_break else ()
    return GraphRecord(
        index=index,
        stage="forward",
        autocast=_regions(seen, device),
        nodes=nodes,
        before=before_records,
        casts=tuple(_forward_casts(seen, after)),
        islands=islands_in(nodes),
        weights=tuple(weights_of(seen)),
        counts=tuple(sorted(seen.counts.items())),
        modules=tuple(module_types(seen.captured, before.frame).items()),
        fallback=seen.fallback,
        break_reason=first_lines(str(reason.reason)) if reason.graph_break else "",
        break_at=f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "",
        kept_values=tuple(_kept_values(seen, after)),
        passes=tuple(seen.passes),
        collectives=sent_by(lowered, is_backward=False),
        kernels=kernels_of(lowered, is_backward=False),
    )


def _kept_values(seen: SeenGraph, reader: GraphReader) -> Iterable[KeptValueRecord]:
    assert seen.rewritten is not None
    placeholders = seen.rewritten.graph.find_nodes(op="placeholder")
    paths = {i: input_path(placeholders[i], reader.frame) for i in seen.weights}
    for recipe, value in seen.kept_values.items():
        yield KeptValueRecord(
            weights=tuple(paths[i] for i in sorted(sources_of(recipe))),
            ops=ops_of(recipe),
            dtype=dtype_name(value.dtype),
            shape=tuple(value.shape),
            num_bytes=num_bytes(value),
        )


def first_lines(reason: str) -> str:
    """The first line of Dynamo's words and its explanation, as one line."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    said = [*lines[:1], *(x for x in lines[1:] if x.startswith("Explanation:"))]
    return " ".join([*said, _RNN_ADVICE] if "RNN, GRU, or LSTM" in reason else said)


_RNN_ADVICE = "torch._dynamo.config.allow_rnn = True has it capture them."
"""What Dynamo does not say itself."""


def _regions(seen: SeenGraph, device: str | None) -> tuple[str, ...]:
    names = region_names(seen.state)
    return tuple(n.replace("cpu ", f"{device} ") for n in names) if device else names


def _read_backward(
    index: int, seen: SeenGraph, lowered: Sequence[LoweredGraph], device: str | None
) -> GraphRecord:
    assert seen.backward is not None
    gm = seen.backward
    remember_captured(gm.graph)
    meter = WorkMeter(detect_fake_mode(gm.graph))
    reader = GraphReader(gm, seen.state, seen.frame, device=device, meter=meter)
    nodes = reader.read()
    return GraphRecord(
        index=index,
        stage="backward",
        autocast=_regions(seen, device),
        nodes=nodes,
        casts=tuple(cast_record(n, n.all_input_nodes[0], reader, "backward") for n in _casts(gm)),
        modules=tuple(module_types(gm, reader.frame).items()),
        saved=saved_for_backward(lowered, seen.frame),
        collectives=sent_by(lowered, is_backward=True),
        kernels=kernels_of(lowered, is_backward=True),
    )


_CASTS = (torch.ops.aten._to_copy.default, CONVERT)


def _casts(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes of a backward that change the dtype of a floating-point tensor."""
    nodes = [node for node in gm.graph.nodes if node.target in _CASTS]
    values = [(n, recorded_value(n.all_input_nodes[0]), recorded_value(n)) for n in nodes]
    return [n for n, old, new in values if old.is_floating_point() and old.dtype != new.dtype]


def islands_in(nodes: Iterable[NodeRecord]) -> tuple[IslandRecord, ...]:
    """The islands among the nodes of a graph."""
    found = [node for node in nodes if node.kind == "island"]
    return tuple(IslandRecord(n.name, n.op, n.module, n.reason) for n in found)


def weights_of(seen: SeenGraph) -> Iterable[WeightRecord]:
    """The weights that a forward graph takes."""
    assert seen.rewritten is not None
    reads = {} if seen.fallback else low_reads(seen.rewritten)
    for node in seen.rewritten.graph.nodes:
        if kind_of(node) == "weight" and isinstance(value := recorded_value(node), torch.Tensor):
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
            continue  # it was put in again outside of the body
        yield _seen_record(entry, seen, reader)


def _seen_record(entry: SeenCast, seen: SeenGraph, reader: GraphReader) -> CastRecord:
    state, removed_by = "inserted", ""
    if entry.node.target is kept_cast or entry.removed_by == "keep_weight_casts":
        state = "kept"
    elif entry.removed_by:
        state, removed_by = "removed", _why_removed(entry, seen, reader)
    wanted_by = clean_reason(entry.cast.reason)
    ended = cast_record(entry.node, entry.source, reader, wanted_by, state, removed_by)
    return dataclasses.replace(ended, consumers=reader.names_of(list(entry.users)))


def _why_removed(entry: SeenCast, seen: SeenGraph, reader: GraphReader) -> str:
    for other in seen.casts.values():
        is_same = other.source is entry.source and other.cast.dtype == entry.cast.dtype
        if is_same and other is not entry and other.removed_by in ("", "keep_weight_casts"):
            return f"shared with {_name(other.node, reader)}"
    if entry.removed_by == "quantize_products":
        return "the weight is quantized to float8 instead"
    if entry.removed_by not in ("fold_casts", "hoist_casts"):
        return f"removed by {entry.removed_by}"
    return f"round trip: the value was {dtype_name(entry.cast.dtype)} before"


def _name(node: fx.Node, reader: GraphReader) -> str:
    return reader.names.get(node, (node.name,))[0]


def cast_record(
    node: fx.Node,
    source: fx.Node,
    reader: GraphReader,
    wanted_by: str,
    state: str = "inserted",
    removed_by: str = "",
) -> CastRecord:
    """The record of a cast, as its node stands in a graph."""
    old, new = recorded_value(source), recorded_value(node)
    names = reader.names.get(source, (source.name,))
    return CastRecord(
        name=_name(node, reader),
        source=names[0] if names else source.name,
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
    """The record of any FX graph whose nodes have values; casts that passes put in are known."""
    state = AutocastState.ambient()
    reader = GraphReader(gm, state, NO_FRAME)
    nodes = reader.read()
    found = [n for n in gm.graph.nodes if CAST.is_on(n) or n.target is kept_cast]
    return GraphRecord(
        index=0,
        stage="forward",
        autocast=region_names(state),
        nodes=nodes,
        casts=tuple(
            cast_record(n, n.all_input_nodes[0], reader, "", _STATES[n.target is kept_cast])
            for n in found
        ),
        islands=islands_in(nodes),
        modules=tuple(module_types(gm, reader.frame).items()),
    )


_STATES = {True: "kept", False: "inserted"}

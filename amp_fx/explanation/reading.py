"""Converts graphs to records."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.records import (
    CASTS,
    CastRecord,
    DecisionRecord,
    GraphRecord,
    NodeRecord,
    TensorRecord,
    WeightRecord,
)
from amp_fx.graphs.bodies import bodies_of, operands_of
from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.locations import NodeLocation, input_path, location_of, module_types, target_name
from amp_fx.graphs.markers import MARKERS
from amp_fx.graphs.metadata import CAST, HAS_REWRITTEN_BODIES, OPAQUE, REMOVED_CASTS, SITE, VALUE
from amp_fx.graphs.reasons import (
    clean_reason,
    decisions_on,
    effect_of,
    origin_and_reason,
    region_names,
)
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import recorded_value, storage_id, tensors_in
from amp_fx.policies.calls import TO_COPY
from amp_fx.policies.float8 import float8_product
from amp_fx.policies.float32_products import WITH_OUT_DTYPE
from amp_fx.regions.module_stack import NO_FRAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from torch import fx

    from amp_fx.passes.low_reads import LowRead
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState

_INPUTS = ("input", "weight")


def read_graph(
    gm: fx.GraphModule,
    state: AutocastState,
    frame: CompileFrame = NO_FRAME,
    *,
    index: int = 0,
    stage: str = "forward",
    device: str | None = None,
    fallback: str = "",
    reads: Mapping[fx.Node, LowRead] = types.MappingProxyType({}),
    cached: Set[tuple[int, torch.dtype | None]] = frozenset(),
) -> GraphRecord:
    """Reads a graph, including bodies of higher-order ops, in one pass over its nodes.

    Args:
        gm: The graph, whose nodes have values.
        state: The autocast state at the start of the graph.
        frame: The modules around the graph.
        index: Number of the graph.
        stage: ``"forward"`` or ``"backward"``.
        device: The device type that the CPU represents, or None.
        fallback: The reason why the graph was not rewritten, or empty.
        reads: The weights that are only read in a low dtype.
        cached: Storages of weights, with the dtypes in which their casts are cached; None for all
            dtypes.
    """
    reader = _GraphReader(state, frame, stage, device, fallback, reads, cached)
    reader.read(gm, "")
    return GraphRecord(
        index=index,
        stage=stage,
        autocast=tuple(map(reader.on_device, region_names(state))),
        nodes=tuple(reader.nodes),
        casts=tuple(reader.casts),
        weights=tuple(reader.weights),
        modules=tuple(module_types(gm, frame).items()),
        fallback=fallback,
    )


@dataclasses.dataclass(eq=False)
class _GraphReader:
    """Reader of one graph; ``read_graph`` describes its attributes."""

    state: AutocastState
    frame: CompileFrame
    stage: str
    device: str | None
    fallback: str
    reads: Mapping[fx.Node, LowRead]
    cached: Set[tuple[int, torch.dtype | None]]
    names: dict[fx.Node, tuple[str, ...]] = dataclasses.field(init=False, default_factory=dict)
    nodes: list[NodeRecord] = dataclasses.field(init=False, default_factory=list)
    casts: list[CastRecord] = dataclasses.field(init=False, default_factory=list)
    weights: list[WeightRecord] = dataclasses.field(init=False, default_factory=list)

    def read(self, gm: fx.GraphModule, prefix: str) -> None:
        """Adds the records of a graph; in a body, names begin with a prefix."""
        for node in gm.graph.nodes:
            if node.target in MARKERS or (prefix and node.op in ("placeholder", "output")):
                continue
            if node.op == "get_attr" and not tensors_in(recorded_value(node)):
                continue
            has_bodies = HAS_REWRITTEN_BODIES.is_on(node)
            inputs = self._read_bodies(gm, node, prefix) if has_bodies else None
            self.names[node] = (prefix + node.name,)
            names = self._names_of(node.all_input_nodes) if inputs is None else inputs
            kind = self._kind(node)
            self.nodes.append(self._record(node, prefix, kind, names))
            self._add_casts(node, prefix, kind)
            value = recorded_value(node)
            if kind == "weight" and not prefix and isinstance(value, torch.Tensor):
                self.weights.append(self._weight(node, value))

    def _read_bodies(self, gm: fx.GraphModule, node: fx.Node, prefix: str) -> tuple[str, ...]:
        """Reads the bodies of a higher-order op; returns the names of their results."""
        results: list[str] = []
        for body in bodies_of(gm, node):
            placeholders = body.graph.find_nodes(op="placeholder")
            for inner, operand in zip(placeholders, operands_of(node), strict=False):
                self.names[inner] = self.names.get(operand, ())
            label = next(name for name, child in gm.named_children() if child is body)
            self.read(body, f"{prefix}{label}.")
            results += self._names_of(body.graph.output_node().all_input_nodes)
        return tuple(dict.fromkeys(results))

    def _names_of(self, nodes: list[fx.Node]) -> tuple[str, ...]:
        """Returns the names under which nodes are recorded."""
        return tuple(dict.fromkeys(name for node in nodes for name in self.names.get(node, ())))

    def _kind(self, node: fx.Node) -> str:
        """Returns ``NodeRecord.kind``."""
        if node.op == "output":
            return "output"
        if node.op == "placeholder":
            is_static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
            is_parameter = isinstance(recorded_value(node), torch.nn.Parameter)
            return "weight" if is_parameter or is_static is not None else "input"
        if node.op == "get_attr":
            return "weight"
        cast = CAST.get(node)
        if cast is not None:
            source = storage_id(VALUE.of(node.all_input_nodes[0])) if self.cached else 0
            is_cached = not self.cached.isdisjoint(((source, cast.dtype), (source, None)))
            return "cached_cast" if is_cached else "cast"
        return "opaque" if OPAQUE.is_on(node) else "op"

    def _record(self, node: fx.Node, prefix: str, kind: str, inputs: tuple[str, ...]) -> NodeRecord:
        location = location_of(node, self.frame)
        op = target_name(node)
        if kind in _INPUTS:
            op = input_path(node, self.frame)
            # A weight belongs to its module, an argument to the root.
            location = NodeLocation("" if kind == "input" else op.rpartition(".")[0])
        origin, reason = origin_and_reason(node, kind, self.state, self.fallback)
        return NodeRecord(
            name=prefix + node.name,
            kind=kind,
            op=op,
            module=location.module,
            module_type=location.module_type,
            file=location.file,
            line=location.line,
            code=location.code,
            dtype=run_dtype(node),
            inputs=inputs,
            outputs=tuple(self._tensor(t) for t in _results(node)),
            decisions=self._decisions(node),
            origin=origin,
            reason=self.on_device(reason),
            is_view=kind == "op" and is_view(node),
        )

    def _decisions(self, node: fx.Node) -> tuple[DecisionRecord, ...]:
        return tuple(
            DecisionRecord(
                d.op,
                self.device or d.device_type,
                d.policy.value,
                d.origin,
                effect_of(d, SITE.of(node).state),
            )
            for d in decisions_on(node)
        )

    def _tensor(self, tensor: torch.Tensor) -> TensorRecord:
        return TensorRecord(
            dtype_name(tensor.dtype),
            tuple(s if isinstance(s, int) else str(s) for s in tensor.shape),
            self.device if self.device and tensor.device.type == "cpu" else tensor.device.type,
            num_bytes(tensor),
        )

    def on_device(self, text: str) -> str:
        """Replaces the CPU in a text by the device type that it represents."""
        return text.replace("cpu ", f"{self.device} ") if self.device else text

    def _add_casts(self, node: fx.Node, prefix: str, kind: str) -> None:
        """Adds the records of a cast, and of the casts that the node replaced."""
        if kind in CASTS or (self.stage == "backward" and _is_backward_cast(node)):
            [source] = node.all_input_nodes
            old, new = recorded_value(source), recorded_value(node)
            record = CastRecord(
                name=prefix + node.name,
                source=next(iter(self.names.get(source, ())), source.name),
                from_dtype=dtype_name(old.dtype),
                to_dtype=dtype_name(new.dtype),
                wanted_by=clean_reason(CAST.of(node).reason) if CAST.is_on(node) else self.stage,
                state="cached" if kind == "cached_cast" else "inserted",
                removed_by="",
                weight=self._weight_path(source),
                consumers=tuple(prefix + user.name for user in node.users),
                bytes_read=num_bytes(old),
                bytes_written=num_bytes(new),
            )
            self.casts.append(record)
        for removed in REMOVED_CASTS.get(node) or ():
            source = next((n for n in node.graph.nodes if n.name == removed.source), node)
            cast = removed.cast
            record = CastRecord(
                name=prefix + removed.name,
                source=prefix + removed.source,
                from_dtype=dtype_name(cast.source_dtype),
                to_dtype=dtype_name(cast.dtype),
                wanted_by=clean_reason(cast.reason),
                state="removed",
                removed_by=removed.why,
                weight=self._weight_path(source),
                consumers=tuple(prefix + name for name in removed.readers),
                bytes_read=removed.num_elements * cast.source_dtype.itemsize,
                bytes_written=removed.num_elements * cast.dtype.itemsize,
            )
            self.casts.append(record)

    def _weight_path(self, source: fx.Node) -> str:
        return input_path(source, self.frame) if self._kind(source) == "weight" else ""

    def _weight(self, node: fx.Node, value: torch.Tensor) -> WeightRecord:
        read = self.reads.get(node)
        return WeightRecord(
            path=input_path(node, self.frame),
            dtype=dtype_name(value.dtype),
            num_bytes=num_bytes(value),
            low_dtype=dtype_name(read.dtype) if read is not None else "",
            is_one_cast=read is not None and read.is_one_cast,
        )


def _is_backward_cast(node: fx.Node) -> bool:
    """Returns True for a node that changes the dtype of a floating-point tensor."""
    if node.target not in (TO_COPY, CONVERT):
        return False
    old, new = recorded_value(node.all_input_nodes[0]), recorded_value(node)
    return bool(old.is_floating_point() and old.dtype != new.dtype)


def _results(node: fx.Node) -> list[torch.Tensor]:
    if node.op == "output":
        return [t for n in node.all_input_nodes for t in tensors_in(recorded_value(n))]
    return tensors_in(recorded_value(node))


def is_view(node: fx.Node) -> bool:
    """Returns True for ops that return the elements of their input unchanged, or no tensor.

    These are the ops whose schema declares that the result may be a view, such as ``contiguous``.
    """
    results = tensors_in(recorded_value(node))
    if not results:
        return True
    family, _, name = target_name(node).removeprefix("aten").partition(".")
    if family == "F":
        return False
    if name in ("getitem", "getattr") or family == "getattr":
        return len(node.all_input_nodes) == 1  # else it is indexed with tensors
    packet = getattr(torch.ops.aten, (name or family).partition(".")[0], None)
    inputs = tensors_in([recorded_value(n) for n in node.all_input_nodes])
    if packet is None or {t.dtype for t in results} != {t.dtype for t in inputs}:
        return False
    return any(getattr(packet, overload).is_view for overload in packet.overloads())


def run_dtype(node: fx.Node) -> str:
    """Returns the compute dtype of a node (``NodeRecord.dtype``)."""
    results = [t.dtype for t in tensors_in(recorded_value(node))]
    inputs = [t.dtype for n in node.all_input_nodes for t in tensors_in(recorded_value(n))]
    if node.target is torch.ops.amp_fx.float32_product.default:
        a, _, low_dtype = node.args
        if recorded_value(a).device.type not in WITH_OUT_DTYPE:  # type: ignore[arg-type]
            return "float32"
        return dtype_name(torch.bfloat16 if low_dtype is None else low_dtype)  # type: ignore[arg-type]
    if node.target is float8_product:
        results = [t.dtype for t in tensors_in(recorded_value(node.args[3]))]  # type: ignore[arg-type]
    for dtypes in (results, inputs):
        floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        float8 = [dtype for dtype in floats if dtype.itemsize == 1]
        if float8:  # float8 data next to its scales, which torch does not promote
            return dtype_name(float8[0])
        if floats:
            return dtype_name(functools.reduce(torch.promote_types, floats))
    return dtype_name((results or inputs)[0]) if results or inputs else ""

"""Turns graphs as the backend left them into records."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.reasons import decisions_on, origin_and_reason
from amp_fx.explanation.records import DecisionRecord, NodeRecord, TensorRecord
from amp_fx.explanation.work import NOTHING
from amp_fx.graphs.bodies import bodies_of, is_rewritten, operands_of
from amp_fx.graphs.metadata import CAST, ISLAND, KEPT_INPUT
from amp_fx.graphs.places import Place, input_path, op_name, place_of
from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import recorded_value, tensors_in
from amp_fx.policies.float8 import float8_product
from amp_fx.weights.kept_cast import kept_cast

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.explanation.work import WorkMeter
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState

_MARKERS = (_enter_autocast, _exit_autocast)
_INPUTS = ("input", "weight", "copy")


class GraphReader:
    """Reads the nodes of one graph, bodies of higher-order ops included.

    Args:
        gm: The graph.
        state: The autocast state where it begins.
        frame: Where it was captured.
        device: What the CPU stands for, where a device is imagined.
        meter: Counts operations and bytes; None leaves them at 0.
        fallback: Why the graph runs under native autocast, or ``""``.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        state: AutocastState,
        frame: CompileFrame,
        *,
        device: str | None = None,
        meter: WorkMeter | None = None,
        fallback: str = "",
    ) -> None:
        self.gm = gm
        self.state = state
        self.device = device
        self.meter = meter
        self.fallback = fallback
        self.frame = frame
        self.names: dict[fx.Node, tuple[str, ...]] = {}
        self._records: list[NodeRecord] = []

    def read(self) -> tuple[NodeRecord, ...]:
        """All nodes, in order."""
        self._read_graph(self.gm, "")
        return tuple(self._records)

    def _read_graph(self, gm: fx.GraphModule, prefix: str) -> None:
        for node in gm.graph.nodes:
            if node.target in _MARKERS or (prefix and node.op in ("placeholder", "output")):
                continue
            if node.op == "get_attr" and not tensors_in(recorded_value(node)):
                continue
            inputs = self._read_bodies(gm, node, prefix) if is_rewritten(node) else None
            self.names[node] = (prefix + node.name,)
            names = self.names_of(self._sources(node)) if inputs is None else inputs
            self._records.append(self._record(node, prefix, names))

    def _read_bodies(self, gm: fx.GraphModule, node: fx.Node, prefix: str) -> tuple[str, ...]:
        """Reads the bodies that a node calls; returns the names of their results."""
        results: list[str] = []
        for body in bodies_of(gm, node):
            placeholders = body.graph.find_nodes(op="placeholder")
            for inner, operand in zip(placeholders, operands_of(node), strict=False):
                self.names[inner] = self.names.get(operand, ())
            label = next(name for name, child in gm.named_children() if child is body)
            self._read_graph(body, f"{prefix}{label}.")
            results += self.names_of(body.graph.output_node().all_input_nodes)
        return tuple(dict.fromkeys(results))

    def names_of(self, nodes: list[fx.Node]) -> tuple[str, ...]:
        """The names under which nodes are recorded."""
        return tuple(dict.fromkeys(name for node in nodes for name in self.names.get(node, ())))

    def _record(self, node: fx.Node, prefix: str, inputs: tuple[str, ...]) -> NodeRecord:
        kind = kind_of(node)
        place = self._input_place(node, kind) if kind in _INPUTS else place_of(node, self.frame)
        origin, reason = origin_and_reason(node, kind, self.state, self.fallback)
        work = self.meter.measure(node) if self.meter is not None else NOTHING
        return NodeRecord(
            name=prefix + node.name,
            kind=kind,
            op=self._label(node, kind),
            module=place.module,
            module_type=place.module_type,
            file=place.file,
            line=place.line,
            code=place.code,
            dtype=run_dtype(node),
            inputs=inputs,
            outputs=tuple(self._tensor(t) for t in _results(node)),
            decisions=self._decisions(node),
            origin=origin,
            reason=reason.replace("cpu ", f"{self.device} ") if self.device else reason,
            flops=work.flops,
            bytes_read=work.moved.read,
            bytes_written=work.moved.written,
            is_counted=work.is_counted,
        )

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What a node is made of: its inputs, or the weight that it is a kept copy of."""
        slot = KEPT_INPUT.get(node)
        if slot is None:
            return node.all_input_nodes
        return [node.graph.find_nodes(op="placeholder")[slot.source_index]]

    def _label(self, node: fx.Node, kind: str) -> str:
        if kind == "copy":
            return input_path(self._sources(node)[0], self.frame)
        return input_path(node, self.frame) if kind in _INPUTS else op_name(node)

    def _input_place(self, node: fx.Node, kind: str) -> Place:
        """An argument stands at the root, a weight in the module that owns it."""
        owner = "" if kind == "input" else self._label(node, kind).rpartition(".")[0]
        return Place(owner, "", "", 0, "")

    def _decisions(self, node: fx.Node) -> tuple[DecisionRecord, ...]:
        return tuple(
            DecisionRecord(d.op, self.device or d.device_type, d.policy.value, d.origin)
            for d in decisions_on(node)
        )

    def _tensor(self, tensor: torch.Tensor) -> TensorRecord:
        return TensorRecord(
            dtype_name(tensor.dtype),
            tuple(s if isinstance(s, int) else str(s) for s in tensor.shape),
            self.device if self.device and tensor.device.type == "cpu" else tensor.device.type,
            num_bytes(tensor),
        )


def _results(node: fx.Node) -> list[torch.Tensor]:
    if node.op == "output":
        return [t for n in node.all_input_nodes for t in tensors_in(recorded_value(n))]
    return tensors_in(recorded_value(node))


def kind_of(node: fx.Node) -> str:
    """What a node is (``NodeRecord.kind``)."""
    if node.op == "output":
        return "output"
    if node.op == "placeholder":
        if KEPT_INPUT.is_on(node):
            return "copy"
        is_static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
        is_parameter = isinstance(recorded_value(node), torch.nn.Parameter)
        return "weight" if is_parameter or is_static is not None else "input"
    if node.op == "get_attr":
        return "weight"
    if CAST.is_on(node):
        return "cast"
    if node.target is kept_cast:
        return "kept_cast"
    return "island" if ISLAND.is_on(node) else "op"


def run_dtype(node: fx.Node) -> str:
    """The dtype that a node runs in (``NodeRecord.dtype``)."""
    results = [t.dtype for t in tensors_in(recorded_value(node))]
    inputs = [t.dtype for n in node.all_input_nodes for t in tensors_in(recorded_value(n))]
    if node.target is float8_product:
        results = [t.dtype for t in tensors_in(recorded_value(node.args[3]))]  # type: ignore[arg-type]
    for dtypes in (results, inputs):
        floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        if floats:
            return dtype_name(functools.reduce(torch.promote_types, floats))
    return dtype_name((results or inputs)[0]) if results or inputs else ""

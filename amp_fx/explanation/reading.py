"""Converts rewritten graphs to records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.records import DecisionRecord, NodeRecord, TensorRecord
from amp_fx.graphs.bodies import bodies_of, is_rewritten, operands_of
from amp_fx.graphs.decompose import NotPlainError, call_key
from amp_fx.graphs.locations import NodeLocation, input_path, location_of, target_name
from amp_fx.graphs.markers import MARKERS
from amp_fx.graphs.metadata import CAST, IS_CACHED, OPAQUE, SITE, VALUE
from amp_fx.graphs.opaque import native_autocast
from amp_fx.graphs.reasons import decisions_on, effect_of, origin_and_reason
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import analysis, argument_values, call_target, recorded_value, tensors_in
from amp_fx.policies.float8 import float8_product
from amp_fx.policies.float32_products import WITH_OUT_DTYPE
from amp_fx.torch_private import pytree
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState
    from amp_fx.torch_private.fake_tensors import FakeTensorMode


class FlopMeter:
    """Counter of the floating-point operations of nodes, which it calls on fake tensors."""

    def __init__(self, fake_mode: FakeTensorMode | None) -> None:
        self._fake_mode = fake_mode
        self._memo: dict[Any, int] = {}

    def count(self, node: fx.Node) -> int:
        """Returns the operations of one call of a node; 0 if the node cannot be called alone."""
        if node.op not in ("call_function", "call_method") or IS_CACHED.is_on(node):
            return 0
        if isinstance(node.target, HigherOrderOperator) or not _may_multiply(node):
            return 0
        if self._fake_mode is None or any(not VALUE.is_on(n) for n in node.all_input_nodes):
            return 0
        try:
            key = call_key(node, node.all_input_nodes)
        except NotPlainError:
            return self._call(node)
        if OPAQUE.is_on(node):
            return self._call(node)
        if key not in self._memo:
            self._memo[key] = self._call(node)
        return self._memo[key]

    def _call(self, node: fx.Node) -> int:
        with contextlib.ExitStack() as stack:
            if OPAQUE.is_on(node):
                stack.enter_context(native_autocast(node, self._fake_mode))
                stack.enter_context(torch.no_grad())
            else:
                stack.enter_context(analysis(self._fake_mode, is_grad_enabled=False))
            try:
                arguments = argument_values(node)
                args, kwargs = pytree.tree_map_only(torch.Tensor, torch.detach, arguments)
                counter = stack.enter_context(FlopCounterMode(display=False))
                call_target(node, args, kwargs)
            except Exception:  # noqa: BLE001 - opaque nodes and bodies of vmap may not run alone
                return 0
        return int(counter.get_total_flops())


def _may_multiply(node: fx.Node) -> bool:
    """Returns True for ops of at least two tensors, the only ones with FLOP formulas."""
    args, kwargs = argument_values(node)
    return len(tensors_in(args, kwargs)) > 1


_INPUTS = ("input", "weight")


@dataclasses.dataclass(eq=False)
class GraphReader:
    """Reader of the nodes of one graph, including bodies of higher-order ops.

    Attributes:
        gm: The graph.
        state: The autocast state at the start of the graph.
        frame: The modules around the graph.
        device: The device type that the CPU represents, or None.
        meter: Counts operations; None omits them.
        fallback: The reason why the graph was not rewritten, or empty.
        names: The names under which nodes are recorded.
    """

    gm: fx.GraphModule
    state: AutocastState
    frame: CompileFrame
    _: dataclasses.KW_ONLY
    device: str | None = None
    meter: FlopMeter | None = None
    fallback: str = ""
    names: dict[fx.Node, tuple[str, ...]] = dataclasses.field(init=False, default_factory=dict)
    _records: list[NodeRecord] = dataclasses.field(init=False, default_factory=list)

    def read(self) -> tuple[NodeRecord, ...]:
        """Returns the records of all nodes, in order."""
        self._read_graph(self.gm, "")
        return tuple(self._records)

    def _read_graph(self, gm: fx.GraphModule, prefix: str) -> None:
        for node in gm.graph.nodes:
            if node.target in MARKERS or (prefix and node.op in ("placeholder", "output")):
                continue
            if node.op == "get_attr" and not tensors_in(recorded_value(node)):
                continue
            inputs = self._read_bodies(gm, node, prefix) if is_rewritten(node) else None
            self.names[node] = (prefix + node.name,)
            names = self.names_of(node.all_input_nodes) if inputs is None else inputs
            self._records.append(self._record(node, prefix, names))

    def _read_bodies(self, gm: fx.GraphModule, node: fx.Node, prefix: str) -> tuple[str, ...]:
        """Reads the bodies of a higher-order op; returns the names of their results."""
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
        """Returns the names under which nodes are recorded."""
        return tuple(dict.fromkeys(name for node in nodes for name in self.names.get(node, ())))

    def _record(self, node: fx.Node, prefix: str, inputs: tuple[str, ...]) -> NodeRecord:
        kind = kind_of(node)
        location = (
            self._input_location(node, kind) if kind in _INPUTS else location_of(node, self.frame)
        )
        origin, reason = origin_and_reason(node, kind, self.state, self.fallback)
        return NodeRecord(
            name=prefix + node.name,
            kind=kind,
            op=self._label(node, kind),
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
            reason=reason.replace("cpu ", f"{self.device} ") if self.device else reason,
            flops=self.meter.count(node) if self.meter is not None else 0,
            is_view=kind == "op" and is_view(node),
        )

    def _label(self, node: fx.Node, kind: str) -> str:
        return input_path(node, self.frame) if kind in _INPUTS else target_name(node)

    def _input_location(self, node: fx.Node, kind: str) -> NodeLocation:
        """Returns the module that owns a weight; arguments belong to the root."""
        owner = "" if kind == "input" else self._label(node, kind).rpartition(".")[0]
        return NodeLocation(owner)

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


def kind_of(node: fx.Node) -> str:
    """Returns the kind of a node (``NodeRecord.kind``)."""
    if node.op == "output":
        return "output"
    if node.op == "placeholder":
        is_static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
        is_parameter = isinstance(recorded_value(node), torch.nn.Parameter)
        return "weight" if is_parameter or is_static is not None else "input"
    if node.op == "get_attr":
        return "weight"
    if CAST.is_on(node):
        return "kept_cast" if IS_CACHED.is_on(node) else "cast"
    return "opaque" if OPAQUE.is_on(node) else "op"


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

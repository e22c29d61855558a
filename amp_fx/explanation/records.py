"""Records of an explanation: frozen dataclasses of strings and numbers.

Dtypes are written without ``torch.``. Sizes are numbers, or strings if they are symbolic.
``amp_fx.explanation.Explanation.to_dict`` returns the records as dictionaries with the field names
as keys.
"""

from __future__ import annotations

import dataclasses

from amp_fx.tables.cast_policy import NO_POLICY

Size = int | str

CASTS = ("cast", "cached_cast")
"""Kinds of nodes that are casts."""


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """One tensor that a node returns.

    Attributes:
        dtype: The dtype, such as ``"bfloat16"``.
        shape: The sizes.
        device: The device type.
        num_bytes: Memory of the elements.
    """

    dtype: str
    shape: tuple[Size, ...]
    device: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class DecisionRecord:
    """The policy of one op inside a node.

    Attributes:
        op: Qualified overload name, such as ``"aten::softmax.int"``.
        device_type: The device type whose table applies.
        policy: ``"lower_precision_fp"``, ``"fp32"``, ...
        origin: Origin of the policy: ``"table"``, an override or a region.
        reason: Effect of the policy; for policies of a table, with the reason.
    """

    op: str
    device_type: str
    policy: str
    origin: str
    reason: str

    @property
    def treatment(self) -> str:
        """The policy, with its origin unless that is a table."""
        return self.policy if self.origin == "table" else f"{self.policy} ({self.origin})"


@dataclasses.dataclass(frozen=True)
class CastRecord:
    """A cast that a pass inserted, including casts that were removed later.

    Attributes:
        name: Name of the node.
        source: Name of the node whose result is cast.
        from_dtype: Dtype of the source.
        to_dtype: Dtype of the result.
        wanted_by: The op that needs the cast, ``"output"``, or the reason why a dtype was restored.
        state: ``"inserted"`` (computed in every call), ``"cached"`` (computed once per write to
            the weight) or ``"removed"``.
        removed_by: The reason of the removal, or ``""``.
        weight: Path of the parameter or buffer that is cast; ``""`` for other tensors.
        consumers: Names of the nodes that read the cast.
        bytes_read: Bytes of the source.
        bytes_written: Bytes of the result.
    """

    name: str
    source: str
    from_dtype: str
    to_dtype: str
    wanted_by: str
    state: str
    removed_by: str
    weight: str
    consumers: tuple[str, ...]
    bytes_read: int
    bytes_written: int

    @property
    def bytes_moved(self) -> int:
        """Bytes that one execution of the cast reads and writes."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """One node of a graph.

    Attributes:
        name: Name, unique in the graph. The names of nodes in a body of a higher-order op start
            with the body's name and a dot.
        kind: ``"input"``, ``"weight"``, ``"op"``, ``"cast"``, ``"cached_cast"`` (a cast that is
            computed once per write to the weight), ``"opaque"`` or ``"output"``.
        op: The target: ``"aten.linear"``, ``"F.gelu"``, ``".view"``; for inputs, the path in the
            model.
        module: Path of the innermost module, such as ``"layers.0.attn"``; ``""`` is the root.
        module_type: Class of that module.
        file: Source file, or ``""``.
        line: Line number in that file, or 0.
        code: Text of the line, or ``""``.
        dtype: The compute dtype: the dtype of a floating-point result, else the promoted dtype of
            the floating-point inputs, else the dtype of the result; ``""`` without tensors.
        inputs: Names of the nodes that this node reads.
        outputs: The tensors that the node returns.
        decisions: The policies that apply in the node; empty if no table lists its ops.
        origin: Origin of the treatment: ``"table"``, ``"region"`` (a region with a separate
            policy), an override, ``"opaque"``, ``"unlisted"``, ``"off"`` (autocast is off) or
            ``""`` for inputs and casts.
        reason: The treatment and its origin as a sentence.
        is_view: True if the node returns the elements of its input unchanged, as view or copy.
    """

    name: str
    kind: str
    op: str
    module: str
    module_type: str
    file: str
    line: int
    code: str
    dtype: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorRecord, ...]
    decisions: tuple[DecisionRecord, ...]
    origin: str
    reason: str
    is_view: bool = False

    @property
    def treatment(self) -> str:
        """The policies that apply in the node, or its origin; shown in tables and pages."""
        policies = ", ".join(dict.fromkeys(d.treatment for d in self.decisions))
        return policies or (NO_POLICY if self.origin == "unlisted" else self.origin)


@dataclasses.dataclass(frozen=True)
class OpaqueRecord:
    """A node that was not rewritten and runs under native autocast, with the reason."""

    name: str
    op: str
    module: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CachedValueRecord:
    """A value computed from weights alone that is cached across calls.

    Attributes:
        weights: Paths of its weights.
        ops: The ops that compute it, in order.
        dtype: The dtype, such as ``"bfloat16"``.
        shape: The sizes.
        num_bytes: Bytes that it takes in addition to the weights, without padding.
    """

    weights: tuple[str, ...]
    ops: tuple[str, ...]
    dtype: str
    shape: tuple[Size, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class WeightRecord:
    """A parameter or buffer that a graph reads.

    Attributes:
        path: Path in the model, such as ``"layers.0.weight"``.
        dtype: The dtype.
        num_bytes: Memory of the elements.
        low_dtype: The dtype to which every reader in the graph casts the weight; ``""`` if there is
            a reader without a cast, or if the dtypes differ.
        is_one_cast: Whether all readers share a single cast of the weight. Its gradient then does
            not change if the weight is stored in ``low_dtype``.
    """

    path: str
    dtype: str
    num_bytes: int
    low_dtype: str
    is_one_cast: bool


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """One graph that Dynamo captured.

    Attributes:
        index: Number of the graph, in the order of capture.
        stage: ``"forward"``, or ``"backward"`` for the graph that AOTAutograd derives.
        autocast: Device types with autocast enabled at the start of the graph, with their dtypes,
            such as ``("cpu bfloat16",)``.
        nodes: Nodes of the rewritten graph, in order.
        casts: The inserted casts, including removed ones; in a backward, the derivatives of casts.
        weights: The parameters and buffers that the graph reads; empty for a backward.
        counts: Counts of the passes, such as ``(("casts_inserted", 12), ...)``.
        modules: Classes of the modules around its nodes, by path.
        fallback: The reason why the whole graph runs under native autocast, or ``""``.
        break_reason: The reason of the graph break at its end, or ``""``.
        break_at: Source line of the graph break, or ``""``.
        cached_values: The values that are cached across calls, including casts.
        uncached: The weights without a cached value, each with the reason.
    """

    index: int
    stage: str
    autocast: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]
    casts: tuple[CastRecord, ...] = ()
    weights: tuple[WeightRecord, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    fallback: str = ""
    break_reason: str = ""
    break_at: str = ""
    cached_values: tuple[CachedValueRecord, ...] = ()
    uncached: tuple[tuple[str, str], ...] = ()

    computed = ("opaque",)

    @property
    def opaque(self) -> tuple[OpaqueRecord, ...]:
        """The nodes that run under native autocast."""
        opaque = [node for node in self.nodes if node.kind == "opaque"]
        return tuple(OpaqueRecord(n.name, n.op, n.module, n.reason) for n in opaque)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over some graphs, for one call.

    Attributes:
        num_graphs: Number of graphs.
        num_ops: Number of ops and opaque nodes, without inserted casts.
        ops_by_dtype: Number of these nodes by compute dtype.
        casts_put_in: Number of inserted casts, including removed ones.
        casts_removed: Number of removed casts: shared casts and round trips.
        casts_cached: Number of casts that are computed once per write to a weight.
        casts_left: Number of casts that are computed in every call.
        bytes_cast: Bytes that the casts of every call read and write.
        bytes_saved: Bytes that cached casts of weights save in every call.
        copy_bytes: Bytes of the results of cached casts.
        values_cached: Number of cached values (``GraphRecord.cached_values``), including casts.
        value_bytes: Memory of cached values.
        num_opaque: Number of nodes that run under native autocast.
        num_fallbacks: Number of graphs that were not rewritten.
        num_breaks: Number of graph breaks.
    """

    num_graphs: int
    num_ops: int
    ops_by_dtype: dict[str, int]
    casts_put_in: int
    casts_removed: int
    casts_cached: int
    casts_left: int
    bytes_cast: int
    bytes_saved: int
    copy_bytes: int
    values_cached: int
    value_bytes: int
    num_opaque: int
    num_fallbacks: int
    num_breaks: int

"""The records of an explanation: frozen dataclasses of strings and numbers.

Dtypes are written without ``torch.``, sizes as numbers or, where they are symbolic, as
text. ``amp_fx.explanation.Explanation.to_dict`` gives these records as dictionaries, with
the field names as keys.
"""

from __future__ import annotations

import dataclasses

from amp_fx.tables.cast_policy import NO_POLICY

Size = int | str


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """One tensor that a node gives out.

    Attributes:
        dtype: ``"bfloat16"``.
        shape: Its sizes.
        device: The device type.
        num_bytes: Its elements' memory.
    """

    dtype: str
    shape: tuple[Size, ...]
    device: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class DecisionRecord:
    """The policy of one op inside a node.

    Attributes:
        op: Qualified overload name: ``"aten::softmax.int"``.
        device_type: The device type whose table was asked.
        policy: ``"lower_precision_fp"``, ``"fp32"``, ...
        origin: Where it comes from: ``"table"``, the override or the region.
        reason: What the policy does to a call and, for those of a table, why.
    """

    op: str
    device_type: str
    policy: str
    origin: str
    reason: str

    @property
    def treatment(self) -> str:
        """The policy, and where it comes from unless that is a table."""
        return self.policy if self.origin == "table" else f"{self.policy} ({self.origin})"


@dataclasses.dataclass(frozen=True)
class CastRecord:
    """A cast that a pass put in, whatever became of it.

    Attributes:
        name: The node's name; that of the cast for removed ones.
        source: Name of the node whose result is cast.
        from_dtype: Dtype of the source.
        to_dtype: Dtype of the result.
        wanted_by: The op that it was put in for; ``"output"``; or why dtypes were restored.
        state: ``"inserted"`` (computed in every call), ``"kept"`` (computed once per update of
            the weight) or ``"removed"``.
        removed_by: Why it was removed, else ``""``.
        weight: Path of the parameter or buffer that is cast; ``""`` for other tensors.
        consumers: Names of the nodes that took it when it was put in.
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
        """Bytes that making the cast once reads and writes."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """One node of a graph.

    Attributes:
        name: Unique in its graph; nodes of a body of a higher-order op begin with the
            body's name and a dot.
        kind: ``"input"``, ``"weight"``, ``"op"``, ``"cast"``, ``"kept_cast"`` (a cast that is
            computed once per update of the weight), ``"island"`` or ``"output"``.
        op: What it calls: ``"aten.linear"``, ``"F.gelu"``, ``".view"``; for inputs their
            path in the model.
        module: Path of the module that it stands in: ``"layers.0.attn"``; ``""`` is the root.
        module_type: That module's class.
        file: Source file of the line that it comes from, or ``""``.
        line: Line number there, or 0.
        code: The line's text, or ``""``.
        dtype: The dtype that it runs in: that of its result if it is a floating-point one,
            else that of its floating-point inputs (of the widest, where there are several),
            else its result's; ``""`` if it has no tensor.
        inputs: Names of the nodes that it takes.
        outputs: The tensors that it gives.
        decisions: The policies met in it; empty for what no table lists.
        origin: Where its treatment comes from: ``"table"``, ``"region"`` (one with a policy
            of its own), an override, ``"island"``, ``"unlisted"``, ``"off"`` (autocast is off
            there) or ``""`` for inputs and casts.
        reason: The same as a sentence.
        flops: Floating-point operations of one call, by ``torch.utils.flop_counter``.
        is_view: True if it returns its input's elements as they are, in a view or a copy.
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
    flops: int
    is_view: bool = False

    @property
    def treatment(self) -> str:
        """The policies met in the node, or the reason's keyword: the name in tables and pages."""
        policies = ", ".join(dict.fromkeys(d.treatment for d in self.decisions))
        return policies or (NO_POLICY if self.origin == "unlisted" else self.origin)


@dataclasses.dataclass(frozen=True)
class IslandRecord:
    """A node that was left as it is and runs under native autocast, and why."""

    name: str
    op: str
    module: str
    reason: str


@dataclasses.dataclass(frozen=True)
class KeptValueRecord:
    """A value computed from weights alone that is cached across calls.

    Attributes:
        weights: Paths of the weights that it is computed from.
        ops: The ops that compute it, in order.
        dtype: ``"bfloat16"``.
        shape: Its sizes.
        num_bytes: Bytes that it takes besides the weights; those of padding are not counted.
    """

    weights: tuple[str, ...]
    ops: tuple[str, ...]
    dtype: str
    shape: tuple[Size, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class WeightRecord:
    """A parameter or buffer that a graph takes, and how it reads it.

    Attributes:
        path: Its path in the model: ``"layers.0.weight"``.
        dtype: Its dtype.
        num_bytes: Its elements' memory.
        low_dtype: The dtype to which every reader in the graph casts it; ``""`` if some read
            it as it is, or to several.
        is_one_cast: Whether that is a single cast of the weight itself, so that its gradient
            is the same if the weight is stored low, too.
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
        index: Its number, in the order of capture.
        stage: ``"forward"``, or ``"backward"`` for the graph that AOTAutograd derives.
        autocast: Device types that autocast where the graph begins, with their dtypes:
            ``("cpu bfloat16",)``.
        nodes: The rewritten graph, in order.
        before: The graph as captured, in order.
        casts: The casts that passes put in, removed ones included; in the backward, the
            derivatives of casts.
        islands: What was left under native autocast.
        weights: The parameters and buffers that it takes; empty for a backward.
        counts: What the passes counted: ``(("casts_inserted", 12), ...)``.
        modules: Classes of the modules that its nodes stand in, by path.
        fallback: Why the graph was not rewritten and runs under native autocast, or ``""``.
        break_reason: Why capture stopped at its end, or ``""`` if the program ended there.
        break_at: Source line of that place, or ``""``.
        kept_values: The values that are cached across calls, the casts kept among them.
    """

    index: int
    stage: str
    autocast: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]
    before: tuple[NodeRecord, ...] = ()
    casts: tuple[CastRecord, ...] = ()
    islands: tuple[IslandRecord, ...] = ()
    weights: tuple[WeightRecord, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    fallback: str = ""
    break_reason: str = ""
    break_at: str = ""
    kept_values: tuple[KeptValueRecord, ...] = ()


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over some graphs, for one call.

    Attributes:
        num_graphs: Number of graphs.
        num_ops: Nodes that call something, without inserted casts.
        ops_by_dtype: Number of these nodes by the dtype that they run in.
        casts_put_in: Casts that passes inserted, removed ones included.
        casts_removed: Casts that were removed again: shared ones and round trips.
        casts_kept: Casts that are computed once per update of a weight.
        casts_left: Casts that are computed in every call.
        bytes_cast: Bytes that the casts left read and write.
        bytes_kept: Bytes that caching casts of weights saves in every call.
        copy_bytes: Bytes of the results of the casts kept.
        values_kept: Number of cached values (``GraphRecord.kept_values``), casts among them.
        value_bytes: Memory that cached values take.
        flops: Floating-point operations by the dtype that they run in.
        flop_share: The same as parts of 1.
        num_islands: Nodes left under native autocast.
        num_fallbacks: Graphs that were not rewritten.
        num_breaks: Graph breaks.
    """

    num_graphs: int
    num_ops: int
    ops_by_dtype: dict[str, int]
    casts_put_in: int
    casts_removed: int
    casts_kept: int
    casts_left: int
    bytes_cast: int
    bytes_kept: int
    copy_bytes: int
    values_kept: int
    value_bytes: int
    flops: dict[str, int]
    flop_share: dict[str, float]
    num_islands: int
    num_fallbacks: int
    num_breaks: int

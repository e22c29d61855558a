"""Sums over graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.explanation.records import CastRecord, GraphRecord

MOVING = ("op", "island", "cast")
"""Kinds of nodes that run on every call."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a few graphs amount to, for one call.

    Attributes:
        num_graphs: How many graphs.
        num_ops: Nodes that call something, casts put in not counted.
        ops_by_dtype: How many of them run in which dtype.
        casts_put_in: Casts that passes put in, whatever became of them.
        casts_removed: Those that were taken out again: shared, or round trips.
        casts_kept: Those that are computed once per update of a weight.
        casts_left: Those that are computed in every call.
        bytes_cast: Bytes that the casts left read and write.
        bytes_removed: The same of the casts removed.
        bytes_kept: Bytes that caching casts of weights saves in every call.
        copy_bytes: Bytes of the results of the casts kept.
        values_kept: Number of cached values (``GraphRecord.kept_values``), casts among them.
        value_bytes: Memory that cached values take.
        weight_casts: Casts of weights among those put in and not removed.
        bytes_read: Bytes that ops and the casts left read, each run by itself as in eager code
            (``NodeRecord.bytes_read``).
        bytes_written: Bytes that they write.
        fused_bytes: Bytes that inductor's kernels read and write (``GraphRecord.kernels``); 0 if
            that was not asked for.
        num_kernels: How many kernels these are.
        num_uncounted: Ops whose bytes could not be counted.
        saved_bytes: Of backwards: what forwards save for them (``GraphRecord.saved``).
        bytes_sent: What one rank hands to the collectives of the graphs.
        bytes_sent_before: The same before ``narrow_gathers``.
        wire_bytes: What one rank sends to others of it, in rings.
        wire_bytes_before: The same before ``narrow_gathers``.
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
    bytes_removed: int
    bytes_kept: int
    copy_bytes: int
    values_kept: int
    value_bytes: int
    weight_casts: int
    bytes_read: int
    bytes_written: int
    fused_bytes: int
    num_kernels: int
    num_uncounted: int
    saved_bytes: int
    bytes_sent: int
    bytes_sent_before: int
    wire_bytes: int
    wire_bytes_before: int
    flops: dict[str, int]
    flop_share: dict[str, float]
    num_islands: int
    num_fallbacks: int
    num_breaks: int

    @property
    def bytes_moved(self) -> int:
        """Bytes that ops and casts read and write."""
        return self.bytes_read + self.bytes_written


def sum_up(graphs: Iterable[GraphRecord], *, num_breaks: int) -> Totals:
    """The totals of some graphs."""
    graphs = tuple(graphs)
    casts = [cast for graph in graphs for cast in graph.casts]
    states = ("removed", "kept", "inserted")
    removed, kept, left = ([cast for cast in casts if cast.state == state] for state in states)
    ops = [n for graph in graphs for n in graph.nodes if n.kind in ("op", "island")]
    flops: Counter[str] = Counter()
    for node in ops:
        if node.flops:
            flops[node.dtype] += node.flops
    moving = [n for graph in graphs for n in graph.nodes if n.kind in MOVING]
    sent = [each for graph in graphs for each in graph.collectives]
    copies = {(c.weight or c.source, c.to_dtype): c.bytes_written for c in kept}
    values = [value for graph in graphs for value in graph.kept_values]
    all_flops = sum(flops.values())
    return Totals(
        num_graphs=len(graphs),
        num_ops=len(ops),
        ops_by_dtype=dict(Counter(node.dtype for node in ops if node.dtype).most_common()),
        casts_put_in=len(casts),
        casts_removed=len(removed),
        casts_kept=len(kept),
        casts_left=len(left),
        bytes_cast=_moved(left),
        bytes_removed=_moved(removed),
        bytes_kept=_moved(kept),
        copy_bytes=sum(copies.values()),
        values_kept=len(values),
        value_bytes=sum(value.num_bytes for value in values),
        weight_casts=sum(bool(cast.weight) for cast in (*kept, *left)),
        bytes_read=sum(node.bytes_read for node in moving),
        bytes_written=sum(node.bytes_written for node in moving),
        fused_bytes=sum(kernel.num_bytes for graph in graphs for kernel in graph.kernels),
        num_kernels=sum(len(graph.kernels) for graph in graphs),
        num_uncounted=sum(not node.is_counted for node in moving),
        saved_bytes=sum(saved.num_bytes for graph in graphs for saved in graph.saved),
        bytes_sent=sum(each.num_bytes for each in sent),
        bytes_sent_before=sum(each.num_bytes_before for each in sent),
        wire_bytes=sum(each.wire_bytes for each in sent),
        wire_bytes_before=sum(each.wire_bytes_before for each in sent),
        flops=dict(flops.most_common()),
        flop_share={dtype: count / all_flops for dtype, count in flops.most_common()},
        num_islands=sum(len(graph.islands) for graph in graphs),
        num_fallbacks=sum(bool(graph.fallback) for graph in graphs),
        num_breaks=num_breaks,
    )


def _moved(casts: Iterable[CastRecord]) -> int:
    return sum(cast.bytes_moved for cast in casts)

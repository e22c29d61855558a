"""The result of ``amp_fx.explain``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.explanation.records import Totals
from amp_fx.reports import Report, as_plain, piped_width, printed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from amp_fx.explanation.diff import Diff
    from amp_fx.explanation.records import CastRecord, GraphRecord, NodeRecord

SCHEMA = 2
"""Version of ``Explanation.to_dict``; raised when a key changes its meaning or goes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """Describes what amp_fx does to a model. Printed, and in a notebook, it is a table.

    Attributes:
        model: The model's class, or the function's name.
        policy: The policy's name, and ``", changed"`` if it is a preset with changes.
        dtype: What low-precision ops run in.
        device_type: The device type that is explained for.
        is_imagined: Whether that device is not there, so that the CPU stood for it.
        graphs: The graphs that Dynamo captured, in order; each forward is followed by its
            backward, if that was asked for.
        other_breaks: Reasons of graph breaks that no captured graph ends with.
        is_whole: Whether one graph is all that the model does: no graph break, no fallback, and
            no code around the graph that Dynamo skipped.
        shared: Paths of the parameters and buffers whose memory is known elsewhere too: tied
            ones, views of each other, and those that the model hands out.
        products: What is otherwise about sums in low products on this CPU; else empty.
        shows_all: Whether the table shows views, too.
    """

    model: str
    policy: str
    dtype: str
    device_type: str
    is_imagined: bool
    graphs: tuple[GraphRecord, ...]
    other_breaks: tuple[str, ...] = ()
    is_whole: bool = True
    shared: tuple[str, ...] = ()
    products: str = ""
    shows_all: bool = False

    @property
    def forward(self) -> tuple[GraphRecord, ...]:
        """The forward graphs."""
        return tuple(graph for graph in self.graphs if graph.stage == "forward")

    @property
    def backward(self) -> tuple[GraphRecord, ...]:
        """The backward graphs; empty if they were not asked for, or there are none."""
        return tuple(graph for graph in self.graphs if graph.stage == "backward")

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes of all rewritten forward graphs."""
        return tuple(node for graph in self.forward for node in graph.nodes)

    @property
    def casts(self) -> tuple[CastRecord, ...]:
        """The casts that were inserted into forward graphs, removed ones included."""
        return tuple(cast for graph in self.forward for cast in graph.casts)

    @property
    def breaks(self) -> tuple[str, ...]:
        """Places where capture was interrupted, with reasons."""
        ended = [
            f"{g.break_reason} ({g.break_at})" if g.break_at else g.break_reason
            for g in self.forward
            if g.break_reason
        ]
        return (*ended, *self.other_breaks)

    @property
    def totals(self) -> Totals:
        """Sums over the forward graphs."""
        return _sum_up(self.forward, num_breaks=len(self.breaks))

    @property
    def backward_totals(self) -> Totals:
        """Sums over the backward graphs; its casts are the derivatives of casts."""
        return _sum_up(self.backward, num_breaks=0)

    def low_weights(self) -> dict[str, torch.dtype]:
        """The weights that could be stored, or gathered, in a low dtype without a changed bit.

        Every reader of such a parameter or buffer takes it through one and the same cast to that
        dtype, also for its gradient. Explain the model in the mode in which it will run. None
        are told where something reads weights that no graph shows: at graph breaks, where
        Dynamo skips code, after a fallback. Tied weights, and such
        as the model hands out, are not among them.

        Returns:
            The dtype by path, in the order of the graph's inputs:
            ``{"layers.0.weight": torch.bfloat16}``.
        """
        if not self.is_whole or self.breaks:
            return {}
        return {
            weight.path: getattr(torch, weight.low_dtype)
            for graph in self.forward
            for weight in graph.weights
            if weight.is_one_cast and weight.path not in self.shared
        }

    def to_dict(self) -> dict[str, Any]:
        """The explanation as dictionaries, lists, strings and numbers.

        Keys: ``schema`` (``SCHEMA``), ``torch`` (its version), the attributes, ``totals`` and
        ``backward_totals`` (the fields of ``records.Totals``), and ``breaks``. Equal models and
        options give equal dictionaries. New keys may come without a new schema.
        """
        more = {
            "totals": self.totals,
            "backward_totals": self.backward_totals,
            "breaks": self.breaks,
        }
        head = {"schema": SCHEMA, "torch": torch.__version__}
        return {**head, **super().to_dict(), **as_plain(more)}

    def diff(self, other: Explanation) -> Diff:
        """Compares with another explanation of the same model.

        Args:
            other: Of another policy or dtype, say.
        """
        from amp_fx.explanation.diff import compare

        return compare(self, other)

    def __str__(self) -> str:
        """The table, as wide as the terminal; 80 columns if there is none."""
        return printed(self._render(), 80 if piped_width() is not None else None)

    def _render(self) -> RenderableType:
        from amp_fx.explanation.table import render

        return render(self)

    def __repr__(self) -> str:
        """One line."""
        totals = self.totals
        return (
            f"<Explanation of {self.model}: {totals.num_graphs} graphs, "
            f"{totals.casts_put_in} casts inserted, {totals.casts_removed} removed, "
            f"{totals.casts_kept} kept>"
        )


def _sum_up(graphs: Sequence[GraphRecord], *, num_breaks: int) -> Totals:
    casts = [cast for graph in graphs for cast in graph.casts]
    states = ("removed", "kept", "inserted")
    removed, kept, left = ([cast for cast in casts if cast.state == state] for state in states)
    ops = [n for graph in graphs for n in graph.nodes if n.kind in ("op", "island")]
    flops: Counter[str] = Counter()
    for node in ops:
        if node.flops:
            flops[node.dtype] += node.flops
    copies = {(c.weight or c.source, c.to_dtype): c.bytes_written for c in kept}
    values = [value for graph in graphs for value in graph.kept_values]
    return Totals(
        num_graphs=len(graphs),
        num_ops=len(ops),
        ops_by_dtype=dict(Counter(node.dtype for node in ops if node.dtype).most_common()),
        casts_put_in=len(casts),
        casts_removed=len(removed),
        casts_kept=len(kept),
        casts_left=len(left),
        bytes_cast=sum(cast.bytes_moved for cast in left),
        bytes_kept=sum(cast.bytes_moved for cast in kept),
        copy_bytes=sum(copies.values()),
        values_kept=len(values),
        value_bytes=sum(value.num_bytes for value in values),
        flops=dict(flops.most_common()),
        flop_share={dtype: count / flops.total() for dtype, count in flops.most_common()},
        num_islands=sum(len(graph.islands) for graph in graphs),
        num_fallbacks=sum(bool(graph.fallback) for graph in graphs),
        num_breaks=num_breaks,
    )

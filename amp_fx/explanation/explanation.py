"""What ``amp_fx.explain`` returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.explanation.totals import Totals, sum_up
from amp_fx.reports import Report, as_plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amp_fx.explanation.diff import Diff
    from amp_fx.explanation.records import CastRecord, GraphRecord, NodeRecord, StepRecord

SCHEMA = 1
"""Version of ``Explanation.to_dict``; raised when a key changes its meaning or goes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """What amp_fx does to a model. Printed, it is a table; in a notebook, the table too.

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
        step: What a step of the optimizer moves, if one was given.
        products: What is otherwise about sums in low products on this CPU; else empty.
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
    step: StepRecord | None = None
    products: str = ""

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
        """The casts that were put into forward graphs, removed ones included."""
        return tuple(cast for graph in self.forward for cast in graph.casts)

    @property
    def breaks(self) -> tuple[str, ...]:
        """Where and why capture was interrupted."""
        ended = [
            f"{g.break_reason} ({g.break_at})" if g.break_at else g.break_reason
            for g in self.forward
            if g.break_reason
        ]
        return (*ended, *self.other_breaks)

    @property
    def totals(self) -> Totals:
        """Sums over the forward graphs."""
        return sum_up(self.forward, num_breaks=len(self.breaks))

    @property
    def backward_totals(self) -> Totals:
        """Sums over the backward graphs; its casts are the derivatives of casts."""
        return sum_up(self.backward, num_breaks=0)

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

        Keys: ``schema`` (``SCHEMA``), ``torch`` (its version), ``model``, ``policy``,
        ``dtype``, ``device_type``, ``is_imagined``, ``is_whole``, ``shared``, ``totals`` and
        ``backward_totals`` (the fields of ``totals.Totals``), ``breaks`` and ``graphs`` (the
        fields of ``records.GraphRecord``, and so on inside) and ``step`` (those of
        ``records.StepRecord``, or None) and ``products``. Equal models and options give equal
        dictionaries. New keys may come without a new schema.
        """
        return {
            "schema": SCHEMA,
            "torch": torch.__version__,
            "model": self.model,
            "policy": self.policy,
            "dtype": self.dtype,
            "device_type": self.device_type,
            "is_imagined": self.is_imagined,
            "is_whole": self.is_whole,
            "shared": list(self.shared),
            "totals": dataclasses.asdict(self.totals),
            "backward_totals": dataclasses.asdict(self.backward_totals),
            "breaks": list(self.breaks),
            "graphs": [as_plain(graph) for graph in self.graphs],
            "step": dataclasses.asdict(self.step) if self.step is not None else None,
            "products": self.products,
        }

    def diff(self, other: Explanation) -> Diff:
        """What is otherwise in another explanation of the same model.

        Args:
            other: Of another policy or dtype, say.
        """
        from amp_fx.explanation.diff import compare

        return compare(self, other)

    def _render(self) -> RenderableType:
        from amp_fx.explanation.table import render

        return render(self)

    def __repr__(self) -> str:
        """One line."""
        totals = self.totals
        return (
            f"<Explanation of {self.model}: {totals.num_graphs} graphs, "
            f"{totals.casts_put_in} casts put in, {totals.casts_removed} taken out, "
            f"{totals.casts_kept} kept>"
        )

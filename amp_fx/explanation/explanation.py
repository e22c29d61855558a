"""The result of ``amp_fx.explain``."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.model_explorer import node_data
from amp_fx.explanation.records import Totals
from amp_fx.explanation.table import graph_parts, notes_on, summary
from amp_fx.reports import Report, piped_width, printed

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from rich.console import RenderableType

    from amp_fx.explanation.records import CastRecord, GraphRecord, NodeRecord

SCHEMA = 4
"""Version of ``Explanation.to_dict``; increased if a key is removed or changes its meaning."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """Explanation of what amp_fx does to a model. Prints as a table, also in notebooks.

    Attributes:
        model: Class of the model, or name of the function.
        policy: Name of the policy, followed by ``", changed"`` if it is a changed preset.
        dtype: Dtype of low-precision ops.
        device_type: The device type that the explanation is for.
        is_imagined: Whether this machine lacks that device, so that the CPU represents it.
        graphs: The graphs that Dynamo captured, in order. Each forward is followed by its backward
            if that was requested.
        other_breaks: Reasons of graph breaks that do not end a captured graph.
        is_whole: Whether one graph contains the whole model: no graph break, no fallback, and no
            code that Dynamo skipped.
        shared: Paths of parameters and buffers with shared memory: tied weights, views of each
            other, and weights that the model returns or that plain attributes of modules refer to.
        products: Note on sums in low-precision products on this CPU, or empty.
        shows_all: Whether the table includes views.
    """

    computed = ("totals", "backward_totals", "breaks")

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
        """The backward graphs; empty if none were requested or derived."""
        return tuple(graph for graph in self.graphs if graph.stage == "backward")

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes of all rewritten forward graphs."""
        return tuple(node for graph in self.forward for node in graph.nodes)

    @property
    def casts(self) -> tuple[CastRecord, ...]:
        """The casts that were inserted into forward graphs, including removed ones."""
        return tuple(cast for graph in self.forward for cast in graph.casts)

    @property
    def breaks(self) -> tuple[str, ...]:
        """The reasons and positions of graph breaks."""
        breaks = [
            f"{g.break_reason} ({g.break_at})" if g.break_at else g.break_reason
            for g in self.forward
            if g.break_reason
        ]
        return (*breaks, *self.other_breaks)

    @property
    def totals(self) -> Totals:
        """Sums over the forward graphs."""
        return _sum_up(self.forward, num_breaks=len(self.breaks))

    @property
    def backward_totals(self) -> Totals:
        """Sums over the backward graphs, whose casts are the derivatives of casts."""
        return _sum_up(self.backward, num_breaks=0)

    def low_weights(self) -> dict[str, torch.dtype]:
        """Returns the weights that can be stored, or gathered, in a low dtype with the same bits.

        All readers of such a parameter or buffer share one cast to that dtype, which also computes
        its gradient. Tied weights, and weights that the model returns, are excluded. The result is
        empty if code outside of the graph may read weights: with graph breaks, skipped code, or
        fallbacks. Explain the model in the mode in which it will run.

        Returns:
            The dtype by path, in the order of the graph's inputs, such as
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
        """Returns the explanation as dictionaries, lists, strings and numbers.

        Keys: ``schema`` (``SCHEMA``), ``torch`` (its version), the attributes, ``totals`` and
        ``backward_totals`` (the fields of ``records.Totals``), and ``breaks``. Equal models and
        options give equal dictionaries. New keys do not change the schema version.
        """
        return {"schema": SCHEMA, "torch": torch.__version__, **super().to_dict()}

    def save(self, path: str | os.PathLike[str], *, format: str = "json") -> Path:  # noqa: A002
        """Writes the explanation to a file.

        Args:
            path: The file.
            format: ``"json"`` for ``to_dict``, or ``"model-explorer"`` for node data of Google's
                Model Explorer: the dtype and the reason of each node, in the colors of
                ``amp_fx.draw``. Model Explorer shows it on a graph with the same names of nodes,
                so explain the exported program (``amp_fx.export``) that it opens.

        Returns:
            The path.

        Raises:
            OptionError: The format is unknown.
            UnsupportedError: The explanation has several graphs, and the format has one.
        """
        if format not in ("json", "model-explorer"):
            raise OptionError(f"format={format!r} is not one of 'json', 'model-explorer'")
        if format == "json":
            text = self.to_json()
        elif len(self.forward) == 1:
            text = json.dumps(node_data(self.forward[0]), indent=2)
        else:
            raise UnsupportedError(
                f"Model Explorer shows one graph, and {self.model} has {len(self.forward)}; export "
                "it as one program with amp_fx.export"
            )
        target = Path(path)
        target.write_text(text, encoding="utf-8")
        return target

    def __str__(self) -> str:
        """Returns the table with the width of the terminal, or 80 columns without a terminal."""
        return printed(self._render(), 80 if piped_width() is not None else None)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        imagined = " (device not available: its op tables on fake tensors)"
        head = f" on {self.device_type} {self.dtype}, policy {self.policy!r}"
        parts: list[RenderableType] = [
            Text.assemble((self.model, "bold"), head, imagined if self.is_imagined else ""),
            summary(self.totals, "forward"),
        ]
        if self.backward:
            parts.append(summary(self.backward_totals, "backward"))
        for graph in self.forward:
            parts += graph_parts(graph, len(self.forward), shows_all=self.shows_all)
        lines = [*notes_on(self.forward, self.breaks), *filter(None, [self.products])]
        return Group(*parts, *map(Text, ["", *lines] if lines else []))

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        totals = self.totals
        return (
            f"<Explanation of {self.model}: {totals.num_graphs} graphs, "
            f"{totals.casts_put_in} casts inserted, {totals.casts_removed} removed, "
            f"{totals.casts_cached} cached>"
        )


def _sum_up(graphs: Sequence[GraphRecord], *, num_breaks: int) -> Totals:
    casts = [cast for graph in graphs for cast in graph.casts]
    cached = [cast for cast in casts if cast.state == "cached"]
    left = [cast for cast in casts if cast.state == "inserted"]
    ops = [n for graph in graphs for n in graph.nodes if n.kind in ("op", "opaque")]
    copies = {(c.weight or c.source, c.to_dtype): c.bytes_written for c in cached}
    values = [value for graph in graphs for value in graph.cached_values]
    return Totals(
        num_graphs=len(graphs),
        num_ops=len(ops),
        ops_by_dtype=dict(Counter(node.dtype for node in ops if node.dtype).most_common()),
        casts_put_in=len(casts),
        casts_removed=len(casts) - len(cached) - len(left),
        casts_cached=len(cached),
        casts_left=len(left),
        bytes_cast=sum(cast.bytes_moved for cast in left),
        bytes_saved=sum(cast.bytes_moved for cast in cached),
        copy_bytes=sum(copies.values()),
        values_cached=len(values),
        value_bytes=sum(value.num_bytes for value in values),
        num_opaque=sum(len(graph.opaque) for graph in graphs),
        num_fallbacks=sum(bool(graph.fallback) for graph in graphs),
        num_breaks=num_breaks,
    )

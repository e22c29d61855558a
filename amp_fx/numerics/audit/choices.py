"""Findings about choices: a rounded value decides which data goes where."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.numerics.audit.recording import Rule
from amp_fx.numerics.audit.report import new_finding
from amp_fx.numerics.audit.rounding import is_move
from amp_fx.observe.storages import Marks, address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.numerics.audit.rounding import Roundings
    from amp_fx.observe.recorder import Event

CHOICES = frozenset(("topk", "sort", "argmax", "argmin", "max", "min"))
COMPARISONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))

ROUTES = frozenset(
    (
        "index",
        "index_select",
        "index_put",
        "index_add",
        "index_copy",
        "gather",
        "take",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "embedding",
        "masked_select",
        "masked_scatter",
        "repeat_interleave",
        "_grouped_mm",
    )
)
"""Ops that move data according to indices or masks."""

GATES = frozenset(("where", "masked_fill", "mul", "mm", "bmm"))
"""Ops that choose between values by a mask, if one of them has a gradient."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """An index or a mask that a rounded value decided.

    Attributes:
        site: The line that chose.
        name: The op.
        dtype: The dtype that the value was rounded to.
        roots: The values that were compared, before pointwise ops.
    """

    site: NodeLocation
    name: str
    dtype: torch.dtype
    roots: frozenset[int]


class ChoiceRule(Rule):
    """Finds ``router_low``.

    A choice that only moves the values that it compared is continuous, as in a leaky ReLU or a
    Huber loss, and is not a finding.
    """

    def __init__(self, roundings: Roundings) -> None:
        self._roundings = roundings
        self._choices: Marks[Choice] = Marks()
        self._roots: Marks[frozenset[int]] = Marks()
        self._num_roots = 0
        self._found: dict[Choice, Event] = {}

    def forward(self, event: Event) -> None:
        """Follows choices to the data that they move."""
        if not event.results:
            return
        choice = next(filter(None, map(self._choices.get, event.tensors)), None)
        if choice is not None:
            self._follow(event, choice)
        self._note_roots(event)
        rounded = self._compared(event)
        if rounded is None:
            return
        rounding = self._roundings.of(rounded)
        for result in event.results:
            if rounding is not None and not result.is_floating_point():
                roots = frozenset().union(*map(self._roots_of, event.floats))
                made = Choice(event.location, event.name, rounding.dtype, roots)
                self._choices.put(result, made)

    def findings(self) -> Iterator[Finding]:
        """Yields choices that moved data."""
        for choice, event in self._found.items():
            message = (
                f"{choice.name} of values rounded to {dtype_name(choice.dtype)} decides where "
                f"{event.name} takes data from."
            )
            yield new_finding("router_low", choice.site, message)

    def _compared(self, event: Event) -> torch.Tensor | None:
        """Returns the input that decides; None if the op chooses nothing."""
        if event.name in CHOICES and event.floats:
            return event.floats[0]
        other = event.args[-1]
        is_zero = not isinstance(other, torch.Tensor) and other == 0
        if event.name not in COMPARISONS or (is_zero and event.name in ("eq", "ne")):
            return None  # a mask of padding: zeros stay zeros
        return next((t for t in event.floats if self._roundings.of(t) is not None), None)

    def _follow(self, event: Event, choice: Choice) -> None:
        """Reports data that a choice moves; else the results are choices too."""
        data = [t for t in event.floats if self._choices.get(t) is None and self._roots_of(t)]
        others = [tensor for tensor in data if not self._roots_of(tensor) & choice.roots]
        if any(event.name in ROUTES or tensor.requires_grad for tensor in others):
            if event.name in ROUTES | GATES:
                self._found.setdefault(choice, event)
            return
        is_gate = event.name in GATES and choice.name not in COMPARISONS
        for result in event.results:
            if is_gate or not data or not result.is_floating_point():
                self._choices.put(result, choice)

    def _roots_of(self, tensor: torch.Tensor) -> frozenset[int]:
        found = self._roots.get(tensor)
        return frozenset((-address_of(tensor),)) if found is None else found

    def _note_roots(self, event: Event) -> None:
        result = event.results[0]
        if not event.tensors:
            roots: frozenset[int] = frozenset()
        elif is_move(event) or torch.Tag.pointwise in event.op.tags:
            roots = frozenset().union(*map(self._roots_of, event.floats))
        else:
            self._num_roots += 1
            roots = frozenset((self._num_roots,))
        self._roots.put(result, roots)

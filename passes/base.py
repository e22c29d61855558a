"""Defines a pass: a frozen dataclass with a name that edits a graph and counts its edits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from torch import fx


@dataclasses.dataclass(frozen=True)
class PassResult:
    """Counts the edits of a pass, by kind.

    Attributes:
        counts: Edits by kind, for example ``{"casts_inserted": 12}``; zeros are dropped.
    """

    counts: Counter[str]

    @property
    def modified(self) -> bool:
        """True if the graph was changed."""
        return any(self.counts.values())


@dataclasses.dataclass(frozen=True)
class PassReport:
    """Reports what one pass did to one graph."""

    name: str
    counts: Counter[str]
    seconds: float


class Observer(Protocol):
    """Receives reports on a graph while it is rewritten."""

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """A pass has run over the graph."""
        ...

    def fell_back(self, error: Exception, graph: fx.Graph) -> None:
        """The graph could not be rewritten; it will run under native autocast."""
        ...

    def rewritten(self, reports: Sequence[PassReport]) -> None:
        """All passes have run."""
        ...


class Pass(Protocol):
    """One rewrite of a graph; its options are its fields.

    A pass edits nodes and counts. Linting, recompiling, timing, logging, error wrapping and
    checking conditions are the runner's. A second run changes nothing.

    It may also have

    - ``requires`` and ``ensures``: conditions (``graphs.conditions``) that hold before and after,
    - ``is_needed``: True where results would be wrong without it, so that it cannot be disabled,
    - ``cache_key``: a string that differs where it may do something else to an equal graph. A pass
      of a user's own that has none keeps its graphs out of on-disk caches.
    """

    name: ClassVar[str]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Edits ``gm.graph`` in place."""
        ...

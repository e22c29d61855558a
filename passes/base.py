"""What a pass is: a frozen dataclass with a name that edits a graph and counts its edits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections import Counter

    from torch import fx


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What a pass did: its edits, by kind.

    Attributes:
        counts: Edits by kind, for example ``{"casts_inserted": 12}``; zeros are dropped.
    """

    counts: Counter[str]

    @property
    def modified(self) -> bool:
        """Whether the graph was changed."""
        return any(self.counts.values())


class Pass(Protocol):
    """One rewrite of a graph; its options are its fields.

    A pass edits nodes and counts. Linting, recompiling, timing, logging and error
    wrapping are the runner's. A second run changes nothing.
    """

    name: ClassVar[str]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Edits ``gm.graph`` in place."""
        ...

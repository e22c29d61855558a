"""Conditions that passes require of a graph and ensure; the runner checks them.

A condition is a named function that finds a node which breaks it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from amp_fx.graphs.metadata import SITE, VALUE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

_MARKERS = (_enter_autocast, _exit_autocast)
_CALLS = ("call_function", "call_method")


@dataclasses.dataclass(frozen=True)
class Condition:
    """Something that holds of every node of a graph.

    Attributes:
        text: It, for a person to read.
        holds: Whether it holds of one node.
    """

    text: str
    holds: Callable[[fx.Node], bool] = dataclasses.field(repr=False)

    def broken_by(self, gm: fx.GraphModule) -> fx.Node | None:
        """The first node that it does not hold of."""
        return next((node for node in gm.graph.nodes if not self.holds(node)), None)


SITES_KNOWN = Condition("every node knows its region and grad mode", SITE.is_on)
"""What ``mark_regions`` ensures."""

VALUES_KNOWN = Condition(
    "every call has a value",
    lambda node: node.op not in _CALLS or node.target in _MARKERS or VALUE.is_on(node),
)
"""What ``insert_casts`` ensures, and every pass after it."""

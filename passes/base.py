"""The interface of a graph pass, and what it reports."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Protocol

from amp_fx.errors import OptionError

if TYPE_CHECKING:
    from collections import Counter

    from torch import fx


@dataclasses.dataclass(frozen=True)
class PassResult:
    """The edits that a pass made, counted by kind.

    Attributes:
        counts: Number of edits of each kind, for example ``{"casts_inserted": 12}``.
    """

    counts: Counter[str]

    @property
    def modified(self) -> bool:
        """Returns True if the pass changed the graph."""
        return any(self.counts.values())


@dataclasses.dataclass(frozen=True)
class PassReport:
    """The edits and the run time of one pass on one graph."""

    name: str
    counts: Counter[str]
    seconds: float


class Pass(Protocol):
    """One rewrite of a graph: a frozen dataclass whose fields are its options.

    A pass edits nodes and counts its edits. The runner lints, recompiles, times, logs, wraps errors
    and checks conditions. A second run must change nothing.

    Optional attributes:

    - ``ops``: names of the ops that the pass rewrites, such as ``"aten::bmm"``. The runner does not
      call the pass for a graph that calls none of them. Not for a pass that reads Python functions
      and methods, which Dynamo captures.
    - ``requires`` and ``ensures``: conditions (``graphs.conditions``) that hold before and after
      the pass.
    - ``is_needed``: True if results are wrong without the pass, so that it cannot be disabled.
    - ``cache_key``: a string that identifies what the pass does to a graph. Graphs that were
      rewritten by a user's pass without one are not cached on disk.
    """

    name: ClassVar[str]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Edits ``gm.graph`` in place."""
        ...


def check_pass(where: str, value: object) -> None:
    """Raises ``OptionError`` if a value is not a pass.

    Args:
        where: The beginning of the message.
        value: The value.
    """
    is_class = isinstance(value, type)
    has_name = isinstance(getattr(value, "name", None), str)
    if is_class or not has_name or not callable(getattr(value, "call", None)):
        raise OptionError(
            f"{where}: {value!r} is not a pass: give an object with a name and a method call(gm)"
        )

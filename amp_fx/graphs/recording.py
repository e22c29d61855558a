"""Lets somebody watch what the backend does to graphs, instead of having them compiled.

``amp_fx.explain`` sends a model through the backend itself, so that what it tells is what
happens; while a recorder is set, nothing is compiled, counted or warned of.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from amp_fx.pipeline import PassReport


class Recorder(Protocol):
    """What is told of each graph, in the order of these methods."""

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """A pass has run over a graph."""
        ...

    def fell_back(self, error: Exception, graph: fx.Graph) -> None:
        """A graph could not be rewritten; it will run under native autocast."""
        ...

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Takes the rewritten graph in the inner compiler's place.

        Returns:
            What Dynamo calls with ``example_inputs``; kept copies are not among them.
        """
        ...


_current: ContextVar[Recorder | None] = ContextVar("amp_fx_recorder", default=None)


def current_recorder() -> Recorder | None:
    """Who is watching, if anybody."""
    return _current.get()


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Has graphs that reach the backend recorded, in this context."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)

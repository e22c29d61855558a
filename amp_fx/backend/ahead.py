"""Graphs that are compiled ahead of time, saved, and loaded in another process.

``torch.compile(model, backend="amp_fx", fullgraph=True).forward.aot_compile(...)`` writes a
compiled graph to a file. Inductor's graphs can be written; this module adds the autocast state of
their calls. Weights are cast in every call, because cached values cannot be written.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from typing import Any

from amp_fx.errors import UnsupportedError
from amp_fx.regions.state import left_on_error, no_autocast
from amp_fx.torch_private.dynamo import BundledAOTAutogradSerializableCallable, SerializableCallable


class SavedGraph(SerializableCallable):
    """A compiled graph that can be saved.

    Args:
        compiled: The graph that inductor compiled.
        is_off: Whether to turn autocast off in each call, because the graph contains its casts.
        has_regions: Whether an exception may leave the graph inside of a region.
    """

    def __init__(self, compiled: Any, *, is_off: bool, has_regions: bool) -> None:
        self.compiled = compiled
        self.is_off = is_off
        self.has_regions = has_regions

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """Returns the graph as bytes."""
        saved = BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(fn.compiled)
        return pickle.dumps((saved, fn.is_off, fn.has_regions))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """Returns the graph that was saved as ``data``."""
        saved, is_off, has_regions = pickle.loads(data)
        compiled = BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(saved)
        return cls(compiled, is_off=is_off, has_regions=has_regions)

    def __call__(self, *args: Any) -> Any:
        """Calls the graph."""
        with ExitStack() as stack:
            if self.is_off:
                stack.enter_context(no_autocast())
            if self.has_regions:
                stack.enter_context(left_on_error())
            return self.compiled(*args)


def is_ahead_of_time() -> bool:
    """Returns True if the backend must return a graph that can be saved.

    Relies on ``torch._dynamo.aot_compile`` setting both options while it calls the backend.
    """
    from amp_fx.torch_private.aot_autograd import config

    return bool(
        getattr(config, "force_autograd_cache", False)
        and getattr(config, "bypass_autograd_cache_key", False)
    )


def as_saved(compiled: Any, *, is_off: bool, has_regions: bool) -> SavedGraph:
    """Returns a compiled graph in a form that can be saved.

    Raises:
        UnsupportedError: Another compiler than inductor compiled the graph, or AOTAutograd cannot
            write it.
    """
    if getattr(compiled, "serialize", None) is None:
        raise UnsupportedError(
            "this graph cannot be compiled ahead of time: torch saves what inductor compiles "
            "(options={'compiler': 'inductor'})"
        )
    bundled = BundledAOTAutogradSerializableCallable(compiled)
    return SavedGraph(bundled, is_off=is_off, has_regions=has_regions)

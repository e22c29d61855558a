"""Applies ``isolate_rows`` to the graphs of AOTAutograd under ``numerics="invariant"``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from amp_fx.backend.disk_caches import without_autograd_cache
from amp_fx.passes.isolate_rows import composites, isolate_rows
from amp_fx.stats import record
from amp_fx.torch_private.tracing import TracingContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from amp_fx.options import Options


def isolating(compile_inside: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Wraps an inner compiler so that it isolates rows first, except in a backward."""
    if options.numerics != "invariant":
        return compile_inside

    def compile_isolated(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            record(isolate_rows(gm.graph, _static_inputs()))
            gm.recompile()
        return compile_inside(gm, example_inputs, **kwargs)

    return compile_isolated


def _static_inputs() -> list[int]:
    """Returns the positions of the weights among the inputs of AOTAutograd's graphs.

    Relies on ``TracingContext.fw_metadata`` and its ``static_input_indices``, as inductor does.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return [] if metadata is None else list(metadata.static_input_indices)


@contextlib.contextmanager
def composites_isolated(options: Options) -> Iterator[None]:
    """Makes AOTAutograd trace composite ops in forms that isolate rows, in a context.

    AOTAutograd's on-disk cache is off: its keys contain the captured graph only.
    """
    if options.numerics != "invariant":
        yield
        return
    with without_autograd_cache(), composites():
        yield

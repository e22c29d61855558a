"""Compiles graphs with the autocast state in which eager code would run their backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.backend.compilers import compile_inner
from amp_fx.backend.fallback import with_autocast_off
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.passes.refuse_mixed_dtypes import MixedDtypesError
from amp_fx.regions.module_stack import ends_at_backward
from amp_fx.regions.state import AutocastState, no_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from amp_fx.backend.lower import Caching
    from amp_fx.options import Options
    from amp_fx.weights.inputs import Inputs

    Compiled = Callable[..., Any]


# Note [Backward outside of the region]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# AOTAutograd traces the backward together with the forward. The forward is traced with autocast
# off, because its casts are nodes. Eager code runs the backward in the autocast state of the call
# of ``backward()``:
#
# - autocast is off if the call is outside of the region, as PyTorch recommends;
# - the region is active if the compiled function itself calls ``backward()``: Dynamo ends the graph
#   at the call.
#
# A backward that multiplies values of several dtypes is also traced in the region. An example is a
# float32 gradient and a bfloat16 tensor that a ``torch.autograd.Function`` saved. Eager code fails
# there with autocast off; ``torch.compile`` works, because it traces every backward in the region.


def compile_with_backward(
    state: AutocastState,
    inputs: Inputs,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    caching: Caching | None,
) -> Compiled:
    """Compiles a rewritten graph and its backward.

    Args:
        state: The autocast state at the beginning of the graph.
        inputs: The inputs of the captured graph.
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        caching: See ``compile_inner``.
    """
    given = (example_inputs, options, caching)
    if not inputs.has_backward or not state.enabled or not options.uses_aot_autograd:
        with no_autocast():
            return compile_inner(gm, *given)
    # See Note [Backward outside of the region].
    if AutocastState.ambient().enabled and ends_at_backward():
        return _trace_in(state, gm, *given)
    try:
        with no_autocast():
            # Of a copy, because the graph is compiled again if its backward mixes dtypes, and
            # compilers edit their graph.
            return compile_inner(copy_graph_module(gm), *given, refuses_mixtures=True)
    except MixedDtypesError:
        return _trace_in(state, gm, *given)


def _trace_in(state: AutocastState, gm: fx.GraphModule, *args: Any) -> Compiled:
    """Compiles a rewritten graph whose backward is traced in an autocast state."""
    inline_shared_bodies(gm)  # torch would reuse bodies that it traced in another state
    with state.applied():
        return compile_inner(with_autocast_off(gm, state), *args)

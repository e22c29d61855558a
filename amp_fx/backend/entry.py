"""The Dynamo backend: ``torch.compile(model, backend="amp_fx")``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from amp_fx import csrc
from amp_fx.backend.ahead import as_saved, is_ahead_of_time
from amp_fx.backend.backward import compile_with_backward
from amp_fx.backend.compilers import compile_inner
from amp_fx.backend.fallback import warn_eager, watch_recompile_limit
from amp_fx.backend.lower import find_cached
from amp_fx.backend.numerics import device_types_of, uses_inductor
from amp_fx.backend.rewrite import rewrite
from amp_fx.backend.transforms import warn_of_transforms
from amp_fx.eager.checkpoints import restore_regions
from amp_fx.eager.region import skip_in_dynamo
from amp_fx.graphs.bodies import copy_graph_module, enters_regions, with_attributes_as_inputs
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.graphs.values import to_meta_inputs
from amp_fx.options import Options
from amp_fx.progress import working
from amp_fx.regions.disabled_guard import guard_disabled_region
from amp_fx.regions.state import AutocastState, left_on_error, no_autocast
from amp_fx.torch_private.dynamo import RestartAnalysis, SkipFrame
from amp_fx.torch_private.tracing import CompileContext
from amp_fx.weights.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import fx

    from amp_fx.backend.ahead import SavedGraph
    from amp_fx.backend.lower import Caching
    from amp_fx.backend.rewrite import Rewritten

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.backend")


def amp_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one captured graph in automatic mixed precision.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        mode: A mode of inductor, as in ``torch.compile(mode=...)``.
        options: Options of amp_fx (``amp_fx.options.Options``) and of inductor.

    Returns:
        The function that Dynamo calls with the inputs of the graph.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
        UnsupportedError: The graph calls an op that autocast bans on its device.
    """
    csrc.start()
    with working(f"compiling a graph of {len(gm.graph.nodes)} nodes"):
        return _handle_graph(gm, example_inputs, Options.parse(options, mode))


def _handle_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    compile_id = CompileContext.current_compile_id()
    if compile_id is not None and compile_id.compiled_autograd_id is not None:
        # Compiled autograd captured a backward, which is not part of a bare region.
        return _with_fallback(gm, compile_inner, example_inputs, options)[0]
    # Dynamo guards autocast's state, but not whether a disabled region is around a call, which
    # requests full precision; no region at all makes the graph a region.
    if options.bare_region:
        guard_disabled_region()
    gm, attributes = with_attributes_as_inputs(gm)
    example_inputs = [*example_inputs, *attributes]
    is_ahead = is_ahead_of_time()
    inputs = Inputs.of(gm, to_meta_inputs(example_inputs) if is_ahead else example_inputs)
    rewritten = rewrite(gm, inputs, options)
    if rewritten.state.enabled and not AutocastState.ambient().enabled:
        watch_recompile_limit(rewritten.root)
    if is_ahead:
        return _save_ahead(rewritten, example_inputs, options)
    caching = find_cached(inputs, rewritten, options)
    off = None if caching is None else caching.why_off()
    if off is not None:
        off.log_reasons()
    try:
        compiled, is_compiled = _with_fallback(
            rewritten.gm,
            functools.partial(compile_with_backward, rewritten.state, inputs),
            example_inputs,
            options,
            caching if off is None else None,
        )
    finally:
        # Compiled code is in Dynamo's cache and would keep the weights of a deleted model alive.
        if caching is not None:
            caching.candidates.weights.clear()
    # The wrappers below are the state of eager code around the call: code inside of them is
    # compiled for it.
    if attributes:
        compiled = _called_with(attributes, compiled)
    if enters_regions(rewritten.gm):
        compiled = called_in(left_on_error, compiled)
    # The graph contains its casts. Code around inductor's turns autocast off, also in the backward;
    # a backward that runs op by op has the state of the call of ``backward()``.
    turns_off = is_compiled and uses_inductor(device_types_of(example_inputs), options)
    if AutocastState.ambient().enabled and not turns_off:
        return called_in(no_autocast, compiled)
    return compiled


@functools.cache
def prepare_torch() -> None:
    """Makes the changes of Dynamo and of checkpoints that compiled programs rely on."""
    skip_in_dynamo()
    warn_of_transforms(amp_fx)
    restore_regions()


def _save_ahead(
    rewritten: Rewritten, example_inputs: Sequence[Any], options: Options
) -> SavedGraph:
    """Compiles a rewritten graph in a form that can be saved. It casts weights in every call."""
    has_regions = enters_regions(rewritten.gm)
    options = dataclasses.replace(options, fallback=False)
    with no_autocast():
        compiled = compile_inner(rewritten.gm, example_inputs, options)
    is_off = bool(AutocastState.ambient().enabled)
    return as_saved(compiled, is_off=is_off, has_regions=has_regions)


def _with_fallback(
    gm: fx.GraphModule,
    compile_graph: Callable[..., Compiled],
    example_inputs: Sequence[Any],
    options: Options,
    caching: Caching | None = None,
) -> tuple[Compiled, bool]:
    """Calls the inner compiler; if it fails, returns a function that runs the graph op by op.

    Returns:
        The function, and False if the inner compiler failed.
    """
    if not options.fallback or options.compiler == "eager":
        return compile_graph(gm, example_inputs, options, caching), True
    # Inner compilers edit their graph, also if they fail, so the fallback needs a copy.
    uncompiled = copy_graph_module(gm)
    try:
        return compile_graph(gm, example_inputs, options, caching), True
    except (RestartAnalysis, SkipFrame):
        raise  # Dynamo catches these and tries again
    except Exception as error:
        log.debug("falling back", exc_info=True)
        warn_eager(error, options.compiler_name, uncompiled.graph)
        inline_shared_bodies(uncompiled)
        return uncompiled.forward, False


def _called_with(more: tuple[torch.Tensor, ...], compiled: Compiled) -> Compiled:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        return compiled(*args, *more)

    return call


def called_in(
    context: Callable[[], AbstractContextManager[Any]], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls ``compiled`` inside of a context."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with context():
            return compiled(*args)

    return call

"""The Dynamo backend: ``torch.compile(model, backend="amp_fx")``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from torch._dynamo.exc import RestartAnalysis, SkipFrame

from amp_fx import csrc
from amp_fx.backend.ahead import as_saved, is_ahead_of_time
from amp_fx.backend.fallback import warn_eager
from amp_fx.backend.freezing import compile_freezing, weights_to_freeze
from amp_fx.backend.inner import compile_inner, inductor_config, uses_inductor
from amp_fx.backend.pipeline import cache_options, in_cache_keys
from amp_fx.backend.rewrite import Reporting, rewrite, trained_weights
from amp_fx.backend.transforms import compile_after_transforms
from amp_fx.graphs.bodies import copy_graph_module, enters_regions, with_attributes_as_inputs
from amp_fx.graphs.places import input_path
from amp_fx.graphs.values import plain_inputs, value_of
from amp_fx.options import Options
from amp_fx.passes.lay_out_kept_copies import lay_out_kept_copies
from amp_fx.progress import working
from amp_fx.regions.cache_keys import guard_disabled_region
from amp_fx.regions.region import restore_regions, skip_in_dynamo
from amp_fx.regions.state import AutocastState, left_on_error, no_autocast
from amp_fx.weights.kept_cast import one_region
from amp_fx.weights.kept_float8 import unpacked
from amp_fx.weights.kept_inputs import kept_inputs, owner_of, verify_level
from amp_fx.weights.variants import Casting, Later, TwoVariants, Unchanged, has_dynamic_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import fx

    from amp_fx.backend.ahead import SavedGraph
    from amp_fx.backend.rewrite import Rewritten

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.backend")

skip_in_dynamo()


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
        options: See ``amp_fx.options.Options``; inductor's own options may be among them.

    Returns:
        What Dynamo calls with the graph's inputs.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
        BannedOpError: The graph makes an op that autocast bans on its device.
    """
    csrc.start()
    with working(f"compiling a graph of {len(gm.graph.nodes)} nodes"):
        return _compiled(gm, example_inputs, Options.parse(options, mode))


def _compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options) -> Compiled:
    if parsed.bare_region:
        guard_disabled_region()
    gm, attributes = with_attributes_as_inputs(gm)
    example_inputs = [*example_inputs, *attributes]
    is_ahead = is_ahead_of_time()
    inputs = plain_inputs(example_inputs) if is_ahead else example_inputs
    found = rewrite(gm, inputs, parsed, Reporting(), is_whole=False)
    parsed = parsed.with_inductor(cache_options(found.passes))
    if is_ahead:
        return _compile_ahead(found, example_inputs, parsed)
    with no_autocast(), in_cache_keys(found.passes):
        compiled = _compile_frozen(gm, found, example_inputs, parsed)
        if compiled is None:
            compiled = _compile_kept(found, example_inputs, parsed)
    if attributes:
        compiled = _called_with(attributes, compiled)
    if enters_regions(found.cast):
        compiled = called_in(left_on_error, compiled)
    if AutocastState.ambient().enabled:
        return called_in(no_autocast, compiled)  # the casts are in the graph already
    return called_in(one_region, compiled) if parsed.shares_region else compiled


compile_after_transforms(amp_fx)
restore_regions()


def _compile_ahead(found: Rewritten, example_inputs: Sequence[Any], options: Options) -> SavedGraph:
    """Compiles a rewritten graph so that it can be saved, with casts of weights kept."""
    gm = found.variant(found.weights)
    has_regions = enters_regions(gm)
    options = dataclasses.replace(options, fallback=False)
    with no_autocast(), in_cache_keys(found.passes):
        kept, inputs = kept_inputs(gm, example_inputs, verify=options.verify, root=found.root)
        compiled = compile_inner(gm, inputs, options)
    is_off = bool(AutocastState.ambient().enabled)
    return as_saved(compiled, kept, is_off=is_off, has_regions=has_regions)


def _compile_frozen(
    captured: fx.GraphModule, found: Rewritten, example_inputs: Sequence[Any], options: Options
) -> Compiled | None:
    """Compiles a rewritten graph with frozen weights; None where that is not to be done."""
    weights = weights_to_freeze(captured, found, example_inputs, options)
    if not weights:
        return None
    later = found.to_keep()
    smallest = min(weights, key=lambda i: value_of(found.placeholders[i]).numel())
    casting = Later(functools.partial(_casting, later, options, (), smallest))
    is_alone = has_dynamic_inputs(found.cast)  # what is compiled later can add no guard
    try:
        frozen = compile_freezing(
            found.variant(),
            example_inputs,
            weights,
            options,
            owner=owner_of(found.cast, found.root),
            verify=verify_level(options.verify),
            may_give_up=not is_alone,
        )
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception:  # whatever it is, the other way has its own fallback
        log.debug("not frozen", exc_info=True)
        return None
    return frozen if is_alone else TwoVariants(Later.made(frozen), casting, is_keeping=True)


def _compile_kept(found: Rewritten, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compiles a rewritten graph, which keeps casts of weights if it has any.

    Where gradients go to weights, on the CPU, the variant that casts those comes first.
    """
    trained = trained_weights(found.cast, found.weights)
    if not trained or options.shares_region:
        leaves = trained if uses_inductor(example_inputs, options) else ()  # the region casts them
        return _keeping(found, options, example_inputs, leaves=leaves)
    names = {node.name: i for i, node in enumerate(found.placeholders)}
    smallest = min((names[n] for n in trained), key=lambda i: example_inputs[i].numel())
    others = tuple(name for name in found.weights if name not in trained)
    casting = Later.made(_casting(found, options, others, smallest, example_inputs))
    keeping = functools.partial(_keeping, found.to_keep(), options, may_give_up=True)
    return TwoVariants(Later(keeping), casting, is_keeping=False)


def _keeping(
    found: Rewritten,
    options: Options,
    example_inputs: Sequence[Any],
    *,
    leaves: Collection[str] = (),
    may_give_up: bool = False,
) -> Compiled:
    """The variant of a graph that keeps the casts of its weights, but for those that it leaves."""
    keeps = [name for name in found.weights if name not in leaves]
    gm = found.variant(keeps, aliases=not leaves)
    with no_autocast(), in_cache_keys(found.passes):
        if uses_inductor(example_inputs, options):
            lay_out_kept_copies(gm, inductor_config(options))
        kept, inputs = kept_inputs(
            gm, example_inputs, verify=options.verify, root=found.root, may_give_up=may_give_up
        )
        compiled = _compile(gm, inputs, options)
    return compiled if kept is None else kept.wrap(compiled)


def _casting(
    found: Rewritten,
    options: Options,
    keeps: Collection[str],
    smallest: int,
    example_inputs: Sequence[Any],
) -> Casting:
    """The variant that casts weights itself, but for ``keeps``.

    The weight at position ``smallest`` is asked whether weights were written.
    """
    gm = found.variant(keeps, aliases=True)
    unchanged = Unchanged(smallest, input_path(found.placeholders[smallest]))
    with no_autocast(), in_cache_keys(found.passes):
        if uses_inductor(example_inputs, options):
            lay_out_kept_copies(gm, inductor_config(options))
        kept, inputs = kept_inputs(
            gm, example_inputs, verify=options.verify, root=found.root, more=(unchanged,)
        )
        assert kept is not None
        return Casting(kept, unpacked(_compile(gm, inputs, options), kept.slots))


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Hands a rewritten graph to the inner compiler; if that fails, runs it op by op."""
    if not options.fallback or options.compiler == "eager":
        return compile_inner(gm, example_inputs, options)
    ours = copy_graph_module(gm)  # inner compilers edit the graph they get
    try:
        return compile_inner(gm, example_inputs, options)
    except (RestartAnalysis, SkipFrame):
        raise  # Dynamo's own way of asking for another try
    except Exception as error:
        log.debug("falling back", exc_info=True)
        warn_eager(error, options.compiler, ours.graph)
        return ours.forward


def _called_with(more: tuple[torch.Tensor, ...], compiled: Compiled) -> Compiled:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        return compiled(*args, *more)

    return call


def called_in(
    context: Callable[[], AbstractContextManager[Any]], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """A callable with every call of it inside of a context."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with context():
            return compiled(*args)

    return call

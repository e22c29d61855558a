"""The Dynamo backend: ``torch.compile(model, backend="amp_fx")``."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame

from amp_fx.errors import PassError
from amp_fx.fallback import as_native_region, warn_eager, warn_fallback
from amp_fx.graphs.decompose import Site
from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.recording import current_recorder
from amp_fx.graphs.values import recorded_value, remember_captured, tensors_in
from amp_fx.inner import compile_inner
from amp_fx.options import Options, check_device_dtype, default_dtype
from amp_fx.pipeline import default_passes, run_passes
from amp_fx.policies.changes import warn_unused
from amp_fx.policies.policy import preset
from amp_fx.regions.module_path import NOWHERE, guard_place, surroundings
from amp_fx.regions.policy_codes import carrying, policy_of
from amp_fx.regions.region import skip_in_dynamo
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.stats import record_graph
from amp_fx.weights.kept_inputs import (
    example_copies,
    keep_passed_inputs,
    keepable_weights,
    plan_kept_casts,
)
from amp_fx.weights.region_cast import one_region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.passes.base import Pass

log = logging.getLogger(__name__)

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
    parsed = Options.parse(options, mode)
    ambient = AutocastState.ambient()
    state = ambient if ambient.enabled else bare_state(gm, ambient, parsed)
    policy = policy_of(state) or parsed.policy
    if policy != preset("torch"):
        state = carrying(state, policy)
    around = surroundings() if policy.resolver.depends_on_place else NOWHERE
    guard_place(around)
    if around.root is not None:
        warn_unused(policy, around.root)
    site = Site(state, torch.is_grad_enabled())
    restores_outputs = not ambient.enabled and parsed.output_dtype == "original"
    weights = keepable_weights(gm, example_inputs) if parsed.weight_cache else ()
    passes = default_passes(
        policy,
        site,
        restores_outputs=restores_outputs,
        kept_weights=weights,
        shares_region=parsed.compiler == "eager",
        around=around,
        guards_range=parsed.range_guard,
    )
    with no_autocast():
        rewritten = _rewrite(gm, passes, parsed) or as_native_region(
            copy_graph_module(gm), state, restores_outputs=restores_outputs
        )
        recorder = current_recorder()
        if recorder is not None:
            return _called_in(no_autocast, recorder.compile(rewritten, example_inputs))
        plan = plan_kept_casts(rewritten, verify=parsed.verify)
        if plan is not None:
            added = example_copies(rewritten, example_inputs)
            keep_passed_inputs(rewritten, plan)
            example_inputs = [*(example_inputs[i] for i in plan.passed), *added]
        compiled = _compile_or_run_eagerly(rewritten, example_inputs, parsed)
    if plan is not None:
        compiled = plan.wrap(compiled)
    if ambient.enabled:
        return _called_in(no_autocast, compiled)  # the casts are in the graph already
    return _called_in(one_region, compiled) if parsed.compiler == "eager" else compiled


def bare_state(gm: fx.GraphModule, ambient: AutocastState, options: Options) -> AutocastState:
    """The region that a whole graph is, where no ambient autocast is on.

    It is one for the device that the graph's tensors are on: an accelerator, if any is
    among them, else the CPU, as a user of ``torch.autocast`` would choose.

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for.
    """
    device_type = graph_device_type(gm) if options.bare_region else None
    if device_type is None:
        return ambient
    dtype = options.dtype or options.policy.low_dtype(device_type) or default_dtype(device_type)
    check_device_dtype(device_type, dtype)
    return ambient.turned(device_type, enabled=True, dtype=dtype)


def graph_device_type(gm: fx.GraphModule) -> str | None:
    """The device type of a graph's tensors; None if autocast knows none of them."""
    values = [recorded_value(node) for node in gm.graph.nodes]
    present = {tensor.device.type for tensor in tensors_in(values)}
    known = [device for device, _ in AutocastState.ambient().low_dtypes if device in present]
    return known[0] if known else None


def _rewrite(gm: fx.GraphModule, passes: Sequence[Pass], options: Options) -> fx.GraphModule | None:
    """A rewritten copy of a graph; None if a pass failed and may be fallen back from."""
    rewritten = copy_graph_module(gm)
    remember_captured(rewritten.graph)
    try:
        reports = run_passes(rewritten, passes)
    except PassError as error:
        if not options.fallback:
            raise
        log.debug("falling back", exc_info=True)
        recorder = current_recorder()
        (warn_fallback if recorder is None else recorder.fell_back)(error, gm.graph)
        return None
    if current_recorder() is None:
        record_graph(reports)
    return rewritten


def _compile_or_run_eagerly(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
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


def _called_in(
    context: Callable[[], AbstractContextManager[Any]], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with context():
            return compiled(*args)

    return call

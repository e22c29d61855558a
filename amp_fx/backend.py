"""The Dynamo backend: ``torch.compile(model, backend="amp_fx")``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.amp.autocast_mode import _enter_autocast

from amp_fx.added_passes import cache_options, in_cache_keys, passes_of_users, with_added
from amp_fx.ahead import as_saved, is_ahead_of_time
from amp_fx.errors import PassError
from amp_fx.fallback import as_native_region, warn_eager, warn_fallback
from amp_fx.freezing import Frozen, compile_freezing, weights_to_freeze
from amp_fx.graphs.attributes import with_attributes_as_inputs
from amp_fx.graphs.decompose import Site
from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.values import plain_inputs, recorded_value, remember_captured, tensors_in
from amp_fx.inner import compile_inner, inductor_config, uses_inductor
from amp_fx.options import (
    Options,
    check_device_dtype,
    check_units,
    default_dtype,
    warn_of_units,
)
from amp_fx.pipeline import default_passes, run_passes
from amp_fx.policies.policy import preset
from amp_fx.regions.checkpoint import restore_regions
from amp_fx.regions.disabled_guard import guard_disabled_region
from amp_fx.regions.module_stack import compile_frame, ends_at_graph_break, guard_module
from amp_fx.regions.policy_codes import pin
from amp_fx.regions.region import skip_in_dynamo
from amp_fx.regions.state import (
    AutocastState,
    in_disabled_region,
    left_on_error,
    no_autocast,
)
from amp_fx.regions.unused import warn_unused
from amp_fx.stats import record_graph
from amp_fx.transforms import watch_transforms
from amp_fx.weights.kept_inputs import (
    example_copies,
    has_aliases,
    keep_passed_inputs,
    keepable_weights,
    owner_of,
    plan_kept_casts,
    verify_level,
)
from amp_fx.weights.layouts import lay_out_kept_copies
from amp_fx.weights.region_cast import one_region
from amp_fx.weights.variants import (
    CompiledLater,
    TwoVariants,
    canary_of,
    slots_inside,
    with_casts_inside,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.ahead import SavedGraph
    from amp_fx.passes.base import Observer, Pass, PassReport
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.weights.cast_plan import Plan

    Compiled = Callable[..., Any]

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
    if parsed.bare_region:
        guard_disabled_region()
    gm, attributes = with_attributes_as_inputs(gm)
    example_inputs = [*example_inputs, *attributes]
    is_ahead = is_ahead_of_time()
    found = rewrite(
        gm,
        plain_inputs(example_inputs) if is_ahead else example_inputs,
        parsed,
        _Reporting(),
        aliases_reads=parsed.compiler != "eager" and has_aliases() and not is_ahead,
    )
    rewritten = found.gm
    parsed = parsed.with_inductor(cache_options(found.passes))
    if is_ahead:
        return _compile_ahead(found, example_inputs, parsed)
    compiled = _compile_frozen(gm, found, example_inputs, parsed)
    if compiled is None:
        compiled = _compile(found, example_inputs, parsed)
    if attributes:
        compiled = _called_with(attributes, compiled)
    if rewritten.graph.find_nodes(op="call_function", target=_enter_autocast):
        compiled = called_in(left_on_error, compiled)
    if AutocastState.ambient().enabled:
        return called_in(no_autocast, compiled)  # the casts are in the graph already
    return called_in(one_region, compiled) if parsed.compiler == "eager" else compiled


watch_transforms(amp_fx)
restore_regions()


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What became of a captured graph.

    Attributes:
        gm: A rewritten copy of it; one under native autocast if a pass failed.
        state: The state of autocast where it begins.
        frame: The modules around the frame that it was captured from.
        passes: What ran over it.
    """

    gm: fx.GraphModule
    state: AutocastState
    frame: CompileFrame
    passes: tuple[Pass, ...]

    @property
    def root(self) -> str | None:
        """The class of the outermost module that is compiled, if it is one."""
        return None if self.frame.root is None else type(self.frame.root).__name__


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    observer: Observer,
    *,
    aliases_reads: bool = False,
) -> Rewritten:
    """Puts casts into a copy of a captured graph, as the ambient region or the options say.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: The options of the backend.
        observer: Told of what is done.
        aliases_reads: Whether weights are to be read through other storages
            (``AliasWeightReads``).

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for.
        BannedOpError: The graph makes an op that autocast bans on its device.
        PassError: A pass failed, and ``fallback`` is off.
    """
    ambient = AutocastState.ambient()
    state = start_state(gm, options)
    policy = state.policy or options.policy
    if state.policy is not None:
        pin(state.policy)
    frame = compile_frame()
    if policy.resolver.depends_on_module:
        guard_module(frame)
        warn_unused(policy, frame, gm)
    restores_outputs = not ambient.enabled and (
        options.output_dtype == "original" or ends_at_graph_break()
    )
    built_in = default_passes(
        policy,
        Site(state, torch.is_grad_enabled(), is_bare=not ambient.enabled),
        restores_outputs=restores_outputs,
        kept_weights=keepable_weights(gm, example_inputs) if options.weight_cache else (),
        shares_region=options.compiler == "eager",
        frame=frame,
        guards_range=options.range_guard,
        aliases_reads=aliases_reads,
    )
    passes = with_added(built_in, options.passes, options.disable_passes)
    with no_autocast():
        rewritten = _run_passes(gm, passes, options, observer) or as_native_region(
            copy_graph_module(gm), state, restores_outputs=restores_outputs
        )
    return Rewritten(rewritten, state, frame, passes)


def start_state(gm: fx.GraphModule, options: Options) -> AutocastState:
    """The state of autocast where a graph begins, with the policy that holds there.

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for.
    """
    return start_state_on(graph_devices(gm), options)


def start_state_on(devices: set[torch.device], options: Options) -> AutocastState:
    """The same for a program whose tensors are on some devices.

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for.
    """
    ambient = AutocastState.ambient()
    state = ambient if ambient.enabled else bare_state(devices, ambient, options)
    for device_type in state.enabled:
        warn_of_units(device_type, _indices(devices, device_type), state.low_dtype(device_type))
    policy = state.policy or options.policy
    return state if policy == preset("torch") else state.with_policy(policy)


def bare_state(
    devices: set[torch.device], ambient: AutocastState, options: Options
) -> AutocastState:
    """The region that a whole graph is, where no ambient autocast is on.

    It is none in a disabled region: ``torch.autocast(..., enabled=False)`` switches off what the
    name of the backend switches on. Else it is one for the device that the graph's tensors are
    on: an accelerator, if any is among them, else the CPU, as a user of ``torch.autocast`` would
    choose.

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for, or inductor makes
            no kernels with it for the device.
    """
    is_region = options.bare_region and not in_disabled_region()
    device_type = region_device_type(devices) if is_region else None
    if device_type is None:
        return ambient
    indices = _indices(devices, device_type)
    dtype = options.dtype or options.policy.low_dtype(device_type)
    dtype = dtype or default_dtype(device_type, indices, warns=True)
    check_device_dtype(device_type, dtype)
    if options.compiler == "inductor":
        check_units(device_type, indices, dtype)
    return ambient.turned(device_type, enabled=True, dtype=dtype)


def region_device_type(devices: set[torch.device]) -> str | None:
    """The device type of the region for tensors on some; None if autocast knows none of them."""
    present = {device.type for device in devices}
    known = [device for device, _ in AutocastState.ambient().low_dtypes if device in present]
    return known[0] if known else None


def graph_devices(gm: fx.GraphModule) -> set[torch.device]:
    """The devices that a graph's tensors are on."""
    values = [recorded_value(node) for node in gm.graph.nodes]
    return {tensor.device for tensor in tensors_in(values)}


def _indices(devices: Iterable[torch.device], device_type: str) -> tuple[int, ...]:
    """Which devices of a type are among some."""
    return tuple(sorted({d.index or 0 for d in devices if d.type == device_type}))


def _run_passes(
    gm: fx.GraphModule, passes: Sequence[Pass], options: Options, observer: Observer
) -> fx.GraphModule | None:
    """A rewritten copy of a graph; None if a pass failed and may be fallen back from."""
    rewritten = copy_graph_module(gm)
    remember_captured(rewritten.graph)
    try:
        reports = run_passes(rewritten, passes, observer=observer)
    except PassError as error:
        if not options.fallback:
            raise
        log.debug("falling back", exc_info=True)
        observer.fell_back(error, gm.graph)
        return None
    observer.rewritten(reports)
    return rewritten


class _Reporting:
    """Counts what was done, and warns of what could not be done."""

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """The runner has logged it."""

    def fell_back(self, error: Exception, graph: fx.Graph) -> None:
        """Warns, once per cause."""
        warn_fallback(error, graph)

    def rewritten(self, reports: Sequence[PassReport]) -> None:
        """Counts (``amp_fx.stats``)."""
        record_graph(reports)


def _compile(found: Rewritten, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compiles a rewritten graph, which keeps casts of weights if it has any."""
    gm = found.gm
    with no_autocast(), in_cache_keys(found.passes):
        if uses_inductor(example_inputs, options):
            lay_out_kept_copies(gm, inductor_config(options))
        plan = plan_kept_casts(gm, example_inputs, verify=options.verify, root=found.root)
        if plan is None:
            return _compile_or_run_eagerly(gm, example_inputs, options)
        added = example_copies(gm, example_inputs)
        keep_passed_inputs(gm, plan)
        example_inputs = [*(example_inputs[i] for i in plan.passed), *added]
        return _compile_with_plan(gm, example_inputs, plan, options, found.passes)


def _compile_ahead(found: Rewritten, example_inputs: Sequence[Any], options: Options) -> SavedGraph:
    """Compiles a rewritten graph so that it can be saved, with casts of weights kept."""
    gm = found.gm
    has_regions = bool(gm.graph.find_nodes(op="call_function", target=_enter_autocast))
    options = dataclasses.replace(options, fallback=False)
    with no_autocast(), in_cache_keys(found.passes):
        plan = plan_kept_casts(gm, example_inputs, verify=options.verify, root=found.root)
        if plan is not None:
            added = example_copies(gm, example_inputs)
            keep_passed_inputs(gm, plan)
            example_inputs = [*(example_inputs[i] for i in plan.passed), *added]
        compiled = compile_inner(gm, example_inputs, options)
    is_off = bool(AutocastState.ambient().enabled)
    return as_saved(compiled, plan, is_off=is_off, has_regions=has_regions)


def _compile_frozen(
    captured: fx.GraphModule, found: Rewritten, example_inputs: Sequence[Any], options: Options
) -> Compiled | None:
    """Compiles a rewritten graph with frozen weights; None where that is not to be done."""
    modules = found.frame.modules()
    weights = weights_to_freeze(captured, found.gm, example_inputs, modules, options)
    if not weights:
        return None
    try:
        with no_autocast(), in_cache_keys(found.passes):
            frozen = compile_freezing(
                found.gm,
                example_inputs,
                weights,
                options,
                owner=owner_of(found.gm, found.root),
                verify=verify_level(options.verify),
            )
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception:  # whatever it is, the other way has its own fallback
        log.debug("not frozen", exc_info=True)
        return None
    return Frozen(frozen, _compiled_later(found, example_inputs, options))


def _compiled_later(found: Rewritten, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """A rewritten graph that keeps casts, to be compiled when it is first called."""
    gm = found.gm
    lay_out_kept_copies(gm, inductor_config(options))
    plan = plan_kept_casts(gm, example_inputs, verify=options.verify, root=found.root)
    compiled = _later(gm, options, found.passes)
    if plan is None:
        return compiled
    keep_passed_inputs(gm, plan)
    return plan.wrap(compiled)


def _later(gm: fx.GraphModule, options: Options, passes: Sequence[Pass]) -> CompiledLater:
    passes = passes_of_users(passes)  # others may hold the model

    def compile_later(inputs: Sequence[Any]) -> Compiled:
        with no_autocast(), in_cache_keys(passes):
            return _compile_or_run_eagerly(gm, inputs, options)

    return CompiledLater(compile_later)


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


def _compile_with_plan(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    options: Options,
    passes: Sequence[Pass],
) -> Callable[..., Any]:
    """Compiles a graph that takes kept copies, or the variant that casts, and that one later."""
    inside = () if plan.specs or not has_aliases() else slots_inside(gm, plan.passed)
    if not inside or options.compiler == "eager":
        return plan.wrap(_compile_or_run_eagerly(gm, example_inputs, options))
    left_out = {len(plan.passed) + i for i in inside}
    outside = [value for i, value in enumerate(example_inputs) if i not in left_out]
    casting = with_casts_inside(gm, inside, plan.passed)
    canary = canary_of(gm, plan, inside)
    first = _compile_or_run_eagerly(casting, outside, options)
    taking = _later(gm, options, passes)
    return TwoVariants(plan, inside, canary, first, taking)


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

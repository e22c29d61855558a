"""Rewrites a captured graph: the casts that its region demands, and variants that keep them."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.autocast_mode import _enter_autocast

from amp_fx.backend.fallback import as_native_region, warn_fallback
from amp_fx.backend.pipeline import default_passes, passes_of_users, run_passes, with_added
from amp_fx.dtypes import is_spread
from amp_fx.errors import PassError
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.decompose import Site
from amp_fx.graphs.places import input_path
from amp_fx.graphs.values import recorded_value, remember_captured, tensors_in, value_of
from amp_fx.options import Options, check_device_dtype, check_units, default_dtype, warn_of_units
from amp_fx.passes.alias_weight_reads import AliasWeightReads
from amp_fx.passes.fold_casts import has_gradient
from amp_fx.passes.keep_weight_casts import KeepWeightCasts, kept_casts
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import (
    NO_FRAME,
    compile_frame,
    ends_at_graph_break,
    guard_module,
    linear_ends,
    warn_unused,
)
from amp_fx.regions.policy_codes import pin
from amp_fx.regions.state import AutocastState, in_disabled_region, no_autocast
from amp_fx.stats import record, record_graph
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_inputs import is_weight, keepable_weights
from amp_fx.weights.variants import has_dynamic_inputs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import fx

    from amp_fx.passes.base import Observer, Pass, PassReport
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger("amp_fx.rewrite")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """Holds the rewritten forms of a captured graph.

    Attributes:
        gm: A rewritten copy of it; one under native autocast if a pass failed.
        cast: The same before casts of weights were taken out.
        state: The state of autocast where it begins.
        frame: The modules around the frame that it was captured from.
        passes: All that ran, or will run, over it.
        rest: Those of them that a variant of ``cast`` still needs.
        root: The class of the outermost module that is compiled, if it is one.
    """

    gm: fx.GraphModule
    cast: fx.GraphModule
    state: AutocastState
    frame: CompileFrame
    passes: tuple[Pass, ...]
    rest: tuple[Pass, ...]

    root: str | None

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs of the graph, as Dynamo gives them."""
        return self.cast.graph.find_nodes(op="placeholder")

    def to_keep(self) -> Rewritten:
        """The same without anything that holds the model, for what is compiled later."""
        return dataclasses.replace(self, frame=NO_FRAME, passes=passes_of_users(self.passes))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the placeholders whose casts may be kept."""
        kept = [each for each in self.rest if isinstance(each, KeepWeightCasts)]
        return tuple(name for each in kept for name, _ in each.weights)

    def variant(self, keeps: Collection[str] = (), *, aliases: bool = False) -> fx.GraphModule:
        """A copy of the graph that keeps the casts of some weights.

        Raises:
            PassError: A pass failed.
        """
        gm = copy_graph_module(self.cast)
        reports = run_passes(gm, [p for p in map(self._for(keeps, aliases), self.rest) if p])
        for report in reports:
            record(report.counts)
        return gm

    def _for(self, keeps: Collection[str], aliases: bool) -> Any:
        def changed(each: Pass) -> Pass | None:
            if isinstance(each, KeepWeightCasts):
                kept = tuple(pair for pair in each.weights if pair[0] in keeps)
                return KeepWeightCasts(kept) if kept else None
            return each if aliases or not isinstance(each, AliasWeightReads) else None

        return changed


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    observer: Observer,
    *,
    is_whole: bool = True,
) -> Rewritten:
    """Puts casts into a copy of a captured graph, as the ambient region or the options say.

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
    keeps = options.weight_cache and engine() is not None
    built_in = default_passes(
        policy,
        Site(state, torch.is_grad_enabled(), is_bare=not ambient.enabled),
        restores_outputs=restores_outputs,
        kept_weights=keepable_weights(gm, example_inputs) if keeps else (),
        shares_region=options.shares_region,
        frame=frame,
        guards_range=options.range_guard,
        aliases_reads=options.compiler != "eager" and not is_whole,
        quantizes=_quantizes(gm, example_inputs, policy, frame),
    )
    passes = with_added(built_in, options.passes, options.disable_passes)
    kept_at = next((i for i, p in enumerate(passes) if p.name == KeepWeightCasts.name), len(passes))
    passes, rest = passes[:kept_at], passes[kept_at:]
    with no_autocast():
        found = _run_passes(gm, passes, rest if is_whole else (), options, observer)
        if found is None:
            gm = copy_graph_module(gm)
            gm = as_native_region(gm, state, restores_outputs=restores_outputs)
            found, rest = (gm, gm), ()
    root = None if frame.root is None else type(frame.root).__name__
    return Rewritten(*found, state, frame, (*passes, *rest), rest, root)


def _quantizes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], policy: Policy, frame: CompileFrame
) -> QuantizeProducts | None:
    """The pass for products in float8; None if no policy can have any."""
    has_regions = bool(gm.graph.find_nodes(op="call_function", target=_enter_autocast))
    if not policy.resolver.has_float8 and not has_regions:
        return None
    placeholders = gm.graph.find_nodes(op="placeholder")
    pairs = [(n, t) for n, t in zip(placeholders, example_inputs, strict=True) if is_weight(n, t)]
    ends = linear_ends(frame.modules())
    names = (
        None
        if ends is None
        else tuple(
            node.name
            for path, end in ends.items()
            for node, tensor in pairs  # which is a fake one where nothing is compiled
            if tensor is end or input_path(node, frame) == path
        )
    )
    return QuantizeProducts(policy, tuple(node.name for node, _ in pairs), names)


def trained_weights(gm: fx.GraphModule, weights: Sequence[str]) -> frozenset[str]:
    """The weights whose casts one of two variants makes itself: those that gradients go to.

    There are none where shapes are symbolic, as the other variant is compiled when no guard can
    be added any more; nor on accelerators, nor where weights are DTensors.

    Args:
        gm: The graph, with all its casts.
        weights: Names of the placeholders whose casts may be kept.
    """
    placeholders = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    values = [value_of(placeholders[name]) for name in weights]
    if any(v.device.type != "cpu" or is_spread(v) for v in values) or has_dynamic_inputs(gm):
        return frozenset()
    found = kept_casts(gm, weights)
    return frozenset(source.name for cast, source in found if has_gradient(cast))


def start_state(gm: fx.GraphModule, options: Options) -> AutocastState:
    """The state of autocast where a graph begins, with the policy that holds there."""
    return start_state_on(graph_devices(gm), options)


def start_state_on(devices: set[torch.device], options: Options) -> AutocastState:
    """The same for a program whose tensors are on some devices."""
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
    captured: fx.GraphModule,
    passes: Sequence[Pass],
    rest: Sequence[Pass],
    options: Options,
    observer: Observer,
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """A rewritten copy of a graph, and one before casts of weights are taken out.

    Returns:
        None if a pass failed and may be fallen back from.
    """
    gm = copy_graph_module(captured)
    remember_captured(gm.graph)
    try:
        reports = run_passes(gm, passes, observer=observer)
        cast = copy_graph_module(gm) if rest else gm
        reports += run_passes(gm, rest, observer=observer)
    except PassError as error:
        if not options.fallback:
            raise
        log.debug("falling back", exc_info=True)
        observer.fell_back(error, captured.graph)
        return None
    observer.rewritten(reports)
    return gm, cast


class Reporting:
    """Counts what was done, and warns of what could not be done."""

    def after_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """The runner has logged it."""

    def fell_back(self, error: Exception, graph: fx.Graph) -> None:
        """Warns, once per cause."""
        warn_fallback(error, graph)

    def rewritten(self, reports: Sequence[PassReport]) -> None:
        """Counts (``amp_fx.stats``)."""
        record_graph(reports)

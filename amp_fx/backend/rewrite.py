"""Rewrites a captured graph: inserts the casts that its region demands."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.fallback import as_native_region, warn_fallback
from amp_fx.backend.pipeline import default_passes, run_passes, with_added
from amp_fx.errors import PassError
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.decompose import Site
from amp_fx.graphs.opened_kernels import is_opened
from amp_fx.graphs.places import input_path
from amp_fx.graphs.policy_mode import ambient_policy, annotated_policy
from amp_fx.graphs.values import recorded_value, remember_captured, tensors_in, value_of
from amp_fx.options import Options, check_device_dtype, check_units, default_dtype, warn_of_units
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import (
    compile_frame,
    ends_at_graph_break,
    guard_module,
    linear_ends,
    warn_unused,
)
from amp_fx.regions.policy_numbers import pin
from amp_fx.regions.state import AutocastState, in_disabled_region, no_autocast
from amp_fx.stats import record_graph
from amp_fx.torch_private.autocast import enter_autocast
from amp_fx.weights.cacheable import is_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.passes.base import Observer, Pass, PassReport
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger("amp_fx.rewrite")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """Holds the rewritten form of a captured graph.

    Attributes:
        gm: A rewritten copy of it; one under native autocast if a pass failed.
        state: The state of autocast where it begins.
        frame: The modules around the frame that it was captured from.
        passes: All passes that ran over it.
        root: The class of the outermost module that is compiled, if it is one.
    """

    gm: fx.GraphModule
    state: AutocastState
    frame: CompileFrame
    passes: tuple[Pass, ...]
    root: str | None


def rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, observer: Observer
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
    built_in = default_passes(
        policy,
        Site(state, torch.is_grad_enabled(), is_bare=not ambient.enabled),
        restores_outputs=restores_outputs,
        weights=tuple(node.name for node, _ in _weights_of(gm, example_inputs)),
        frame=frame,
        guards_range=options.range_guard,
        quantizes=_quantizes(gm, example_inputs, policy, frame),
        output_dtypes=_program_dtypes(gm, ambient) if restores_outputs else None,
    )
    passes = with_added(built_in, options.passes, options.disable_passes)
    with no_autocast():
        rewritten = _run_passes(gm, passes, options, observer)
        if rewritten is None:
            rewritten = copy_graph_module(gm)
            rewritten = as_native_region(rewritten, state, restores_outputs=restores_outputs)
    root = None if frame.root is None else type(frame.root).__name__
    return Rewritten(rewritten, state, frame, passes, root)


def _weights_of(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[tuple[fx.Node, torch.Tensor]]:
    """Returns the placeholders that are weights, with their tensors."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [(n, t) for n, t in zip(placeholders, example_inputs, strict=True) if is_weight(n, t)]


def _quantizes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], policy: Policy, frame: CompileFrame
) -> QuantizeProducts | None:
    """The pass for products in float8; None if no policy can have any."""
    has_regions = bool(gm.graph.find_nodes(op="call_function", target=enter_autocast))
    if not policy.resolver.has_float8 and not has_regions:
        return None
    pairs = _weights_of(gm, example_inputs)
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


def _program_dtypes(
    gm: fx.GraphModule, state: AutocastState
) -> tuple[torch.dtype | None, ...] | None:
    """Returns the dtypes of the outputs in the uncompiled program; None for those of capture.

    Dynamo captures a region with a policy under native autocast, and fake tensors know nothing of
    casts inside of kernels. Where there is such a region, or such a kernel, the dtypes are those
    that the graph has with the casts of its own regions alone.
    """
    if not any(annotated_policy(gm, node) or is_opened(node) for node in gm.graph.nodes):
        return None
    program = copy_graph_module(gm)
    remember_captured(program.graph)
    MarkRegions(Site(state, torch.is_grad_enabled())).call(program)
    InsertCasts(preset("torch")).call(program)
    outputs: Any = program.graph.output_node().args[0]
    values = [value_of(node) if isinstance(node, fx.Node) else None for node in outputs]
    return tuple(
        value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None
        for value in values
    )


def start_state(gm: fx.GraphModule, options: Options) -> AutocastState:
    """The state of autocast where a graph begins, with the policy that holds there."""
    return start_state_on(graph_devices(gm), options)


def start_state_on(devices: set[torch.device], options: Options) -> AutocastState:
    """Returns ``start_state`` for a program whose tensors are on some devices."""
    ambient = AutocastState.ambient()
    state = ambient if ambient.enabled else bare_state(devices, ambient, options)
    for device_type in state.enabled:
        warn_of_units(device_type, _indices(devices, device_type), state.low_dtype(device_type))
    policy = ambient_policy() or options.policy
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
    """Returns the indices of the devices of one type."""
    return tuple(sorted({d.index or 0 for d in devices if d.type == device_type}))


def _run_passes(
    captured: fx.GraphModule, passes: Sequence[Pass], options: Options, observer: Observer
) -> fx.GraphModule | None:
    """Returns a rewritten copy of a graph; None if a pass failed and ``fallback`` is on."""
    gm = copy_graph_module(captured)
    remember_captured(gm.graph)
    try:
        reports = run_passes(gm, passes, observer=observer)
    except PassError as error:
        if not options.fallback:
            raise
        log.debug("falling back", exc_info=True)
        observer.fell_back(error, captured.graph)
        return None
    observer.rewritten(reports)
    return gm


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

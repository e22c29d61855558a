"""Rewrites captured graphs: inserts the casts of their autocast regions."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.added_passes import check_passes, with_added
from amp_fx.backend.fallback import as_native_region, warn_fallback, warn_transforms
from amp_fx.backend.numerics import is_strict
from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.backend.unused_patterns import warn_unused
from amp_fx.errors import PassError
from amp_fx.graphs.bodies import copy_graph_module, enters_regions, has_shared_bodies
from amp_fx.graphs.decomposed_kernels import has_decomposition
from amp_fx.graphs.locations import input_path
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.opaque import RejectedTransformError
from amp_fx.graphs.policy_mode import ambient_policy, annotated_policy
from amp_fx.graphs.records import AutocastSite
from amp_fx.graphs.values import recorded_value, remember_captured, tensors_in
from amp_fx.options import Options, check_device_dtype, check_units, default_dtype, warn_of_units
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import (
    compile_frame,
    ends_at_graph_break,
    guard_modules,
    linear_ends,
    whole_model,
)
from amp_fx.regions.policy_numbers import pin
from amp_fx.regions.state import AutocastState, in_disabled_region, no_autocast
from amp_fx.stats import record
from amp_fx.torch_private.autocast import enter_autocast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.passes.base import Pass, PassReport
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.weights.inputs import Inputs

log = logging.getLogger("amp_fx.rewrite")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten copy of a captured graph.

    Attributes:
        gm: The copy. If a pass failed, its ops run under native autocast.
        state: The autocast state at the beginning of the graph.
        frame: The modules around the captured frame.
        passes: The passes that ran.
        root: The class name of the outermost compiled module; None for a function.
        reports: The edits of each pass; empty if a pass failed.
        error: The error of the pass that failed, or None.
    """

    gm: fx.GraphModule
    state: AutocastState
    frame: CompileFrame
    passes: tuple[Pass, ...]
    root: str | None
    reports: tuple[PassReport, ...] = ()
    error: PassError | None = None


def rewrite(
    gm: fx.GraphModule, inputs: Inputs, options: Options, *, is_reported: bool = True
) -> Rewritten:
    """Inserts casts into a copy of a captured graph, following the ambient region or the options.

    Args:
        gm: The graph that Dynamo captured.
        inputs: Its inputs.
        options: The options of the backend.
        is_reported: Whether ``amp_fx.stats`` counts the rewrite, and a fallback warns.

    Raises:
        OptionError: The device cannot autocast to the requested dtype, or there is no pass of a
            disabled name (``check_passes``).
        UnsupportedError: The graph calls an op that autocast bans on its device.
        PassError: A pass failed and the option ``fallback`` is False.
    """
    check_passes(options)
    ambient = AutocastState.ambient()
    state = start_state(graph_devices(gm), options)
    policy = state.policy or options.policy
    if state.policy is not None:
        pin(state.policy)
    frame = compile_frame(gm)
    if policy.resolver.depends_on_module:
        guard_modules(frame)
    restores_outputs = not ambient.enabled and (
        options.output_dtype == "original" or ends_at_graph_break()
    )
    built_in = captured_passes(
        policy,
        AutocastSite(state, torch.is_grad_enabled(), is_bare=not ambient.enabled),
        restores_outputs=restores_outputs,
        weights=tuple(inputs.nodes[i].name for i in inputs.weights),
        frame=frame,
        guards_range=options.range_guard,
        # On accelerators, a product with an expanded matrix copies nothing, and flattening copies a
        # batch that is not contiguous. So there, it is only done for eager autocast's bits.
        flattens=state.enabled == ("cpu",) or options.compiler != "inductor" or is_strict(options),
        quantizes=_quantizes(gm, inputs, policy, frame),
        output_dtypes=_program_dtypes(gm, ambient) if restores_outputs else None,
    )
    passes = with_added(built_in, options.passes, options.disable_passes)
    # Passes evaluate nodes, whose inputs the ambient region would cast a second time.
    with no_autocast():
        reports: list[PassReport] = []
        failure = None
        try:
            rewritten, reports = _run_passes(gm, passes)
        except PassError as error:
            if not options.fallback:
                raise
            log.debug("falling back", exc_info=True)
            failure = error
            if is_reported:
                warn_fallback(error, gm.graph, frame)
            rewritten = copy_graph_module(gm)
            rewritten = as_native_region(rewritten, state, restores_outputs=restores_outputs)
        else:
            if is_reported:
                record({"graphs": 1}, *(report.counts for report in reports))
            if policy.modules:
                warn_unused(policy, frame, rewritten)
    root = None if frame.root is None else type(frame.root).__name__
    return Rewritten(rewritten, state, frame, passes, root, tuple(reports), failure)


def _quantizes(
    gm: fx.GraphModule, inputs: Inputs, policy: Policy, frame: CompileFrame
) -> QuantizeProducts | None:
    """Returns the pass for float8 products; None if no policy of the graph has float8."""
    has_regions = bool(gm.graph.find_nodes(op="call_function", target=enter_autocast))
    if not policy.resolver.has_float8 and not has_regions:
        return None
    modules = whole_model(frame)
    # Paths of the ends begin at the whole model, and those of inputs at the compiled module.
    is_part = modules != frame.modules()
    ends = linear_ends(modules)
    weights = [(inputs.nodes[i], inputs.tensors[i]) for i in inputs.weights]
    names = (
        None
        if ends is None
        else tuple(
            node.name
            for path, end in ends.items()
            for node, tensor in weights  # a fake tensor if the graph is only explained
            if tensor is end or (not is_part and input_path(node, frame) == path)
        )
    )
    return QuantizeProducts(policy, tuple(node.name for node, _ in weights), names)


def _program_dtypes(
    gm: fx.GraphModule, state: AutocastState
) -> tuple[torch.dtype | None, ...] | None:
    """Returns the output dtypes of the uncompiled program; None if Dynamo captured them.

    Dynamo captures a region with a policy under native autocast, fake tensors ignore casts inside
    of kernels, and a shared body is captured in the region of its first call only. In such graphs,
    the output dtypes are those of the graph with the casts of its own regions only.
    """
    is_uncertain = any(
        annotated_policy(gm, node) or has_decomposition(node) for node in gm.graph.nodes
    )
    if not is_uncertain and not (has_shared_bodies(gm) and enters_regions(gm)):
        return None
    program = copy_graph_module(gm)
    remember_captured(program.graph)
    MarkRegions(AutocastSite(state, torch.is_grad_enabled())).call(program)
    InsertCasts(preset("torch")).call(program)
    outputs: Any = program.graph.output_node().args[0]
    values = [VALUE.get(node) if isinstance(node, fx.Node) else None for node in outputs]
    return tuple(
        value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None
        for value in values
    )


def start_state(devices: set[torch.device], options: Options) -> AutocastState:
    """Returns the autocast state and policy at the beginning of a graph, given its devices."""
    ambient = AutocastState.ambient()
    state = ambient if ambient.enabled else bare_state(devices, ambient, options)
    for device_type in state.enabled:
        warn_of_units(device_type, _indices(devices, device_type), state.low_dtype(device_type))
    policy = ambient_policy() or options.policy
    return state if policy == preset("torch") else state.with_policy(policy)


def bare_state(
    devices: set[torch.device], ambient: AutocastState, options: Options
) -> AutocastState:
    """Returns the autocast state of a graph outside of any enabled autocast region.

    The graph becomes a region for the device of its tensors: the accelerator if there is one, else
    the CPU. In a region with ``enabled=False``, autocast stays off.
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
    """Returns the device type to autocast on; None if autocast supports none of the devices."""
    present = {device.type for device in devices}
    known = [device for device, _ in AutocastState.ambient().low_dtypes if device in present]
    return known[0] if known else None


def graph_devices(gm: fx.GraphModule) -> set[torch.device]:
    """Returns the devices of a graph's tensors."""
    values = [recorded_value(node) for node in gm.graph.nodes]
    return {tensor.device for tensor in tensors_in(values)}


def _indices(devices: Iterable[torch.device], device_type: str) -> tuple[int, ...]:
    """Returns the indices of the devices of ``device_type``."""
    return tuple(sorted({d.index or 0 for d in devices if d.type == device_type}))


def _run_passes(
    captured: fx.GraphModule, passes: Sequence[Pass]
) -> tuple[fx.GraphModule, list[PassReport]]:
    """Returns a rewritten copy of a graph, and the edits of each pass."""
    gm = copy_graph_module(captured)
    remember_captured(gm.graph)
    try:
        return gm, run_passes(gm, passes)
    except PassError as error:
        if not isinstance(error.__cause__, RejectedTransformError):
            raise
        # Such a transform raises under eager autocast too. Without casts inside of it, it runs, and
        # the rest of the graph is still rewritten.
        warn_transforms(error.__cause__, captured.graph)
        return _run_passes(captured, tuple(map(_without_transforms, passes)))


def _without_transforms(each: Pass) -> Pass:
    """Returns a pass that does not apply autocast inside of transforms."""
    if not isinstance(each, MarkRegions):
        return each
    return MarkRegions(dataclasses.replace(each.site, casts_transforms=False))

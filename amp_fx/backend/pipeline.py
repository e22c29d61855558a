"""All passes in order, and the runner that lints, checks, times and logs each of them.

Dynamo's captured graphs pass through ``captured_passes`` before AOTAutograd differentiates them.
AOTAutograd's graphs (forward, backward, inference) pass through ``aot_passes`` before inductor
compiles them; ``packing_passes`` are part of them. Each function returns its passes in the order in
which they run. Exported programs have lists of their own (``exporting/rewriting.py``).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.errors import AmpFxError, PassError
from amp_fx.graphs.bodies import graph_modules_in, graphs_in
from amp_fx.graphs.casts import op_names
from amp_fx.graphs.conditions import check_graph
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import storage_id
from amp_fx.passes.base import PassReport, PassResult
from amp_fx.passes.block_few_rows import BlockFewRows
from amp_fx.passes.constants_to_inputs import ConstantsToInputs
from amp_fx.passes.copy_returned_inputs import CopyReturnedInputs
from amp_fx.passes.decompose_attention import DecomposeAttention
from amp_fx.passes.decompose_float32_products import DecomposeFloat32Products
from amp_fx.passes.flatten_products import FlattenProducts
from amp_fx.passes.fold_batch_norms import FoldBatchNorms
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.fold_constants import FoldConstants
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.keep_eager_kernels import KeepEagerKernels
from amp_fx.passes.lay_out_constants import LayOutConstants
from amp_fx.passes.lay_out_convolutions import LayOutConvolutions
from amp_fx.passes.leave_small_products import LeaveSmallProducts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.merge_duplicates import MergeDuplicates
from amp_fx.passes.narrow_gathers import NarrowGathers
from amp_fx.passes.pack_for_kernels import PackForKernels
from amp_fx.passes.protect_saved_inputs import ProtectSavedInputs
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.passes.record_output_strides import RecordOutputStrides
from amp_fx.passes.record_values import RecordValues
from amp_fx.passes.refuse_mixed_dtypes import RefuseMixedDtypes
from amp_fx.passes.refuse_packing import RefusePacking
from amp_fx.passes.reject_opaque_nodes import RejectOpaqueNodes
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.passes.reuse_casts import ReuseCasts
from amp_fx.passes.round_biases import RoundBiases
from amp_fx.passes.round_compared import RoundCompared
from amp_fx.passes.separate_inputs import SeparateInputs
from amp_fx.passes.split_weights import SplitWeights
from amp_fx.passes.store_weights_low import StoreWeightsLow
from amp_fx.passes.weights_to_constants import WeightsToConstants
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.passes.widen_products import WidenProducts
from amp_fx.passes.widen_weight_grads import WidenWeightGrads
from amp_fx.passes.wrap_opaque_nodes import WrapOpaqueNodes
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.tracing import trace_structured
from amp_fx.weights.read_only import is_checking

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from amp_fx.graphs.records import AutocastSite
    from amp_fx.options import Options
    from amp_fx.passes.base import Pass
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.weights.inputs import Candidates
    from amp_fx.weights.pack import Constants


log = logging.getLogger("amp_fx.pipeline")
pass_log = logging.getLogger("amp_fx.passes")

CAPTURED_PASSES: tuple[type[Pass], ...] = (
    InlineRegions,
    MarkRegions,
    InsertCasts,
    RestoreOutputs,
    QuantizeProducts,
    HoistCasts,
    FoldCasts,
    StoreWeightsLow,
    RejectOpaqueNodes,
    DecomposeFloat32Products,
    WidenOps,
    ReuseCasts,
    WrapOpaqueNodes,
)
"""Passes on captured graphs in the order in which they run. Some run only on exported programs."""

AOT_PASSES: tuple[type[Pass], ...] = (
    RefuseMixedDtypes,
    RecordValues,
    RecordOutputStrides,
    CopyReturnedInputs,
    NarrowGathers,
    WidenWeightGrads,
    FlattenProducts,
    DecomposeAttention,
    LayOutConvolutions,
    SplitWeights,
    ProtectSavedInputs,
    WeightsToConstants,
    MergeDuplicates,
    FoldBatchNorms,
    FoldConstants,
    BlockFewRows,
    WidenProducts,
    LeaveSmallProducts,
    LayOutConstants,
    PackForKernels,
    RoundBiases,
    RefusePacking,
    ConstantsToInputs,
    RoundCompared,
    KeepEagerKernels,
    SeparateInputs,
)
"""Passes on AOTAutograd's graphs, roughly in order; ``aot_passes`` and ``packing_passes`` say when
each runs. ``FoldConstants`` and ``RecordValues`` run more than once."""

BUILT_IN: Mapping[str, type[Pass]] = {kind.name: kind for kind in (*CAPTURED_PASSES, *AOT_PASSES)}
"""All passes by name."""


def captured_passes(
    policy: Policy,
    site: AutocastSite,
    *,
    restores_outputs: bool,
    weights: tuple[str, ...] = (),
    frame: CompileFrame = NO_FRAME,
    guards_range: bool = True,
    flattens: bool = True,
    quantizes: QuantizeProducts | None = None,
    output_dtypes: tuple[torch.dtype | None, ...] | None = None,
) -> tuple[Pass, ...]:
    """Returns the passes for a captured graph.

    Args:
        policy: The cast policy of each op.
        site: Autocast state and grad mode at the beginning of the graph.
        restores_outputs: Whether outputs get the dtypes of the uncompiled program.
        weights: Names of the placeholders that are weights.
        frame: The modules around the compiled frame (``module_stack.compile_frame``).
        guards_range: The option ``range_guard``.
        flattens: Whether products are flattened where eager autocast does. Then rows of a batch of
            one are added up otherwise than those of others.
        quantizes: The pass for float8 products; None if the policy has none.
        output_dtypes: Output dtypes of the uncompiled program (``RestoreOutputs``).
    """
    return (
        # Every op gets the autocast state in which it was captured; the next pass reads it.
        MarkRegions(site),
        InsertCasts(policy, frame, guards_range, flattens),
        # Before casts are folded: a cast back to float32 may undo one of the pass above.
        *((RestoreOutputs(output_dtypes),) if restores_outputs else ()),
        # Quantizes what products read, after it was cast to the low dtype.
        *((quantizes,) if quantizes is not None else ()),
        # Before folding: a cast that leaves a body may be equal to one outside.
        HoistCasts(weights),
        FoldCasts(),
        # Last: the passes above read the ops that are wrapped.
        WrapOpaqueNodes(),
    )


def joint_passes() -> tuple[Pass, ...]:
    """Returns the passes for a joint graph of forward and backward, before it is partitioned.

    ``lower.Caching.partition`` runs ``LayOutConvolutions`` as well, on the graphs whose values it
    saves.
    """
    return (RefuseMixedDtypes(),)


def aot_passes(
    options: Options,
    candidates: Candidates | None,
    *,
    stage: str,
    num_returned: int,
    is_inductor: bool,
    is_strict: bool,
    moving: Collection[str] | None = None,
    packing: tuple[Pass, ...] = (),
) -> tuple[Pass, ...]:
    """Returns the passes for a graph of AOTAutograd.

    Args:
        options: The options of the backend.
        candidates: The weights that may be cached; None caches nothing.
        stage: ``"forward"``, ``"backward"`` or ``"inference"``.
        num_returned: Number of outputs that are returned to the caller.
        is_inductor: Whether inductor compiles the graph; otherwise it runs op by op.
        is_strict: Whether generated code must round where eager code rounds.
        moving: Names of the inputs whose addresses change between calls, for CUDA graphs; None
            without them.
        packing: ``packing_passes``, if weights become constants.
    """
    is_backward = stage == "backward"
    exact = (torch.bfloat16,) if has_product_kernels(torch.bfloat16) else ()
    passes: list[Pass] = [
        # Inductor's joint passes add nodes without values, which all passes below read.
        RecordValues(),
        # Before any pass changes the layout of a result.
        *((RecordOutputStrides(),) if is_inductor else ()),
        *((CopyReturnedInputs(),) if candidates is not None and is_backward else ()),
        # Before casts of weights are cached: a cast that is gathered must not become a value.
        *((NarrowGathers(),) if options.narrow_gathers else ()),
    ]
    if is_inductor:
        passes += [
            *((WidenWeightGrads(),) if options.has_wide_weight_grads else ()),
            # Before weights are split off or packed, because only plain products are packed. Where
            # oneDNN has no kernels for bfloat16, a flattened product has other bits.
            FlattenProducts(
                exact if is_strict else (torch.bfloat16, torch.float16), options.has_eager_kernels
            ),
            *(() if is_strict else (DecomposeAttention(),)),
        ]
    if packing:
        passes += packing
    elif candidates is not None and not is_backward:
        # A forward with gradients was laid out before it was partitioned: its backward reads the
        # same values (``lower.Caching.partition``).
        if is_inductor and stage == "inference":
            passes.append(LayOutConvolutions(candidates, num_returned, is_inference=True))
        passes.append(SplitWeights(candidates, num_returned))
        # After cached values became inputs, among which it looks.
        if stage == "forward":
            passes.append(ProtectSavedInputs(num_returned))
    if is_inductor:
        passes += [
            # After caching: what is cached is the low cast, and the float32 form of it is computed
            # in the kernel that reads it. ``packing_passes`` widens products before it packs them.
            *(() if is_strict or packing else (WidenProducts(),)),
            # Marks of nodes come last, because passes above replace nodes.
            RoundCompared(),
            *((KeepEagerKernels(),) if options.has_eager_kernels else ()),
            # Last: it looks for unused inputs, and removes outputs, which passes above read.
            *((SeparateInputs(moving),) if moving is not None else ()),
        ]
    return tuple(passes)


def packing_passes(
    constants: Constants,
    weights: Mapping[int, torch.Tensor],
    options: Options,
    *,
    is_strict: bool,
    is_channels_last: bool,
) -> tuple[Pass, ...]:
    """Returns the passes that pack weights in a graph without gradients.

    Args:
        constants: Records how constants are computed.
        weights: The weights by their positions among the inputs.
        options: The options of the backend.
        is_strict: Whether generated code must round where eager code rounds.
        is_channels_last: Whether inductor's convolutions are channels-last.
    """
    fold = FoldConstants(constants)
    folds_batch_norm = not is_strict and options.fold_batch_norm is not False
    return (
        WeightsToConstants(constants, weights),
        # Before folding, so that equal values are computed and packed once.
        MergeDuplicates(),
        # Before constants are folded: it scales weights in float32, before they are rounded.
        *((FoldBatchNorms(),) if folds_batch_norm else ()),
        # The next passes read rounded weights as constants.
        fold,
        # Before products are widened or packed: the template reads low weights, in blocks. They are
        # computed before inductor's passes, which know no padding.
        *(() if is_strict else (BlockFewRows(), fold)),
        # Before products are packed: oneDNN has no fast kernels for what is widened.
        *(() if is_strict else (WidenProducts(), fold)),
        # Before all constants are packed. After few rows have their kernel, which is faster still,
        # and float32 weights are constants.
        LeaveSmallProducts(constants),
        # Before packing, which computes the copies and packs them.
        *((LayOutConstants(),) if is_channels_last else ()),
        PackForKernels(
            constants, folds_batch_norm=bool(options.fold_batch_norm), chooses_kernels=not is_strict
        ),
        # Whether a convolution takes a float32 bias is known once it is packed or was not.
        RoundBiases(),
        # Computes packed weights and rounded biases.
        fold,
        # Inductor's passes add nodes without values, which the checks and marks below read.
        RecordValues(),
        # Raises if packed kernels add up otherwise: the graph is compiled again without constants.
        *((RefusePacking(),) if is_strict else ()),
        # Last: all passes above recognize weights as constants.
        ConstantsToInputs(constants),
    )


def run_passes(
    gm: fx.GraphModule, passes: Iterable[Pass], *, check: bool | None = None
) -> list[PassReport]:
    """Runs passes over a graph, in place.

    Args:
        gm: The graph.
        passes: The passes, in order.
        check: Whether to check the graph's invariants after every pass. The default is True if the
            environment variable ``AMP_FX_CHECK`` is ``1``.

    Raises:
        PassError: A pass failed, or a condition that it requires or ensures does not hold. The
            message names the pass and those that ran before it.
        AmpFxError: A pass rejected the graph.
        AssertionError: The graph violates an invariant after a pass (``check``).
    """
    # The check evaluates every node again, so it is on in tests and random programs only.
    is_checked = is_checking() if check is None else check
    reports: list[PassReport] = []
    for current in passes:
        start = time.perf_counter()
        try:
            _check_conditions(gm, current, "requires")
            # amp_fx's own passes change inputs and outputs, and the compiler accounts for that.
            storages = None if current.name in BUILT_IN else _storages(gm.graph)
            interface = None if storages is None else _interface(gm.graph, storages)
            # Most passes are for a few ops, which most graphs do not call.
            ops = getattr(current, "ops", None)
            is_idle = ops is not None and op_names(gm).isdisjoint(ops)
            result = PassResult(Counter()) if is_idle else current.call(gm)
            if storages is not None and interface is not None:
                _check_interface(interface, _interface(gm.graph, storages))
            for graph in graphs_in(gm) if result.modified else ():
                graph.lint()
            _check_conditions(gm, current, "ensures")
        except AmpFxError:
            # A pass rejects a graph on purpose, and the caller or the user gets its own message.
            raise
        except Exception as error:
            before = ", ".join(report.name for report in reports) or "no other pass on this graph"
            raise PassError(
                f"pass {current.name!r} failed after {before}: {type(error).__name__}: {error}"
            ) from error
        if is_checked:
            check_graph(gm, current.name)
        report = PassReport(current.name, +result.counts, time.perf_counter() - start)
        reports.append(report)
        _log_pass(gm, report)
    # Once, at the end: no pass runs the code of a graph, and generating it takes long for large
    # graphs.
    if any(report.counts for report in reports):
        for module in graph_modules_in(gm):
            module.recompile()
    return reports


def _storages(graph: fx.Graph) -> dict[fx.Node, object]:
    """Returns the storage of each node's value; a node of its own for other values."""
    values = {node: VALUE.get(node) for node in graph.nodes}
    return {
        node: storage_id(value) if isinstance(value, torch.Tensor) else node
        for node, value in values.items()
    }


def _interface(
    graph: fx.Graph, storages: Mapping[fx.Node, object]
) -> tuple[list[str], str, list[int]]:
    """Returns what a program relies on: inputs, structure of the outputs, and shared memory.

    Args:
        graph: The graph.
        storages: Storages of the nodes before the pass. Values of new nodes are not read: a pass
            may give a node the value of another one.

    Returns:
        Names of the inputs; structure of the outputs; for each input and each output, the position
        of the first of them in the same storage.
    """
    outputs = [node.args for node in graph.find_nodes(op="output")]
    nodes: list[fx.Node] = graph.find_nodes(op="placeholder")
    names = [node.name for node in nodes]
    map_arg(outputs, nodes.append)
    places = [storages.get(node, node) for node in nodes]
    structure = map_arg(outputs, lambda _: "value")
    return names, str(structure), [places.index(place) for place in places]


def _check_interface(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    if before[:2] != after[:2]:
        raise _ConditionError(
            "it changed the inputs of the graph, or the number and structure of its outputs, which "
            "the program relies on"
        )
    if before[2] != after[2]:
        raise _ConditionError(
            "it changed which outputs share memory with an input or with each other, and the "
            "program may write to one of them"
        )


class _ConditionError(Exception):
    """A graph does not meet a condition of a pass."""


def _check_conditions(gm: fx.GraphModule, current: Pass, what: str) -> None:
    for condition in getattr(current, what, ()):
        for node in gm.graph.nodes:
            if not condition.holds(node):
                raise _ConditionError(f"it {what} that {condition.text}, and {node} does not")


def _log_pass(gm: fx.GraphModule, report: PassReport) -> None:
    pass_log.info(
        "%s: %s in %.1f ms",
        report.name,
        ", ".join(f"{count} {kind}" for kind, count in report.counts.items()) or "no change",
        1e3 * report.seconds,
    )
    pass_log.debug("after %s:\n%s", report.name, gm.graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"amp_fx_{report.name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
    )

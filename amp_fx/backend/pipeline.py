"""The passes in order, and the runner that does for all of them what none does itself."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from torch import fx
from torch._logging._internal import trace_structured

from amp_fx.errors import AmpFxError, PassError
from amp_fx.graphs.conditions import check_graph
from amp_fx.passes.alias_weight_reads import AliasWeightReads
from amp_fx.passes.base import PassReport
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.keep_weight_casts import KeepWeightCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.passes.refuse_islands import RefuseIslands
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.passes.share_region_casts import ShareRegionCasts
from amp_fx.passes.store_weights_low import StoreWeightsLow
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.passes.wrap_islands import WrapIslands
from amp_fx.regions.module_stack import NO_FRAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.graphs.decompose import Site
    from amp_fx.passes.base import Observer, Pass
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger("amp_fx.pipeline")
pass_log = logging.getLogger("amp_fx.passes")

CHECK_ENVIRONMENT = "AMP_FX_CHECK"

PASSES: tuple[type[Pass], ...] = (
    InlineRegions,
    MarkRegions,
    InsertCasts,
    RestoreOutputs,
    QuantizeProducts,
    HoistCasts,
    FoldCasts,
    KeepWeightCasts,
    AliasWeightReads,
    ShareRegionCasts,
    StoreWeightsLow,
    RefuseIslands,
    WidenOps,
    WrapIslands,
)
"""All passes, in the order in which they run; some are for exported programs alone."""


def default_passes(
    policy: Policy,
    site: Site,
    *,
    restores_outputs: bool,
    kept_weights: tuple[tuple[str, tuple[str, ...]], ...] = (),
    frame: CompileFrame = NO_FRAME,
    guards_range: bool = True,
    shares_region: bool = False,
    aliases_reads: bool = False,
    quantizes: QuantizeProducts | None = None,
) -> tuple[Pass, ...]:
    """The pipeline.

    Args:
        policy: Which op is cast how.
        site: Autocast state and grad mode at the graph's start.
        restores_outputs: Whether outputs get the dtypes of the uncompiled program.
        kept_weights: The placeholders whose casts may be kept (``KeepWeightCasts``).
        frame: The modules around the compiled frame (``module_stack.compile_frame``).
        guards_range: Whether numbers that the low dtype cannot hold are looked for.
        shares_region: Whether casts of leaves are shared with what runs around the graph
            (``ShareRegionCasts``).
        aliases_reads: Whether weights whose casts are kept are read through other storages
            (``AliasWeightReads``).
        quantizes: Runs products in float8; None if the policy has none.
    """
    return (
        MarkRegions(site),
        InsertCasts(policy, frame, guards_range),
        *((RestoreOutputs(),) if restores_outputs else ()),
        *((quantizes,) if quantizes is not None else ()),
        HoistCasts(tuple(name for name, _ in kept_weights)),
        FoldCasts(),
        *((KeepWeightCasts(kept_weights),) if kept_weights else ()),
        *((AliasWeightReads(kept_weights),) if kept_weights and aliases_reads else ()),
        *((ShareRegionCasts(),) if shares_region else ()),
        WrapIslands(),
    )


def run_passes(
    gm: fx.GraphModule,
    passes: Iterable[Pass],
    *,
    check: bool | None = None,
    observer: Observer | None = None,
) -> list[PassReport]:
    """Runs passes over a graph, in place.

    Args:
        gm: The graph.
        passes: What to run, in order.
        check: Whether to check the graph's invariants after every pass; by default if
            the environment variable ``AMP_FX_CHECK`` is ``1``.
        observer: Told of each pass.

    Raises:
        PassError: A pass failed, or what it requires or ensures does not hold; the message names
            it and those that ran before.
        AmpFxError: A pass refused the graph on purpose.
    """
    is_checked = os.environ.get(CHECK_ENVIRONMENT) == "1" if check is None else check
    reports: list[PassReport] = []
    for current in passes:
        start = time.perf_counter()
        try:
            _check_conditions(gm, current, "requires")
            result = current.call(gm)
            if result.modified:
                _finish(gm)
            _check_conditions(gm, current, "ensures")
            if is_checked:
                check_graph(gm, current.name)
        except AmpFxError:
            raise
        except Exception as error:
            before = ", ".join(report.name for report in reports) or "nothing"
            raise PassError(
                f"pass {current.name!r} failed after {before}: {type(error).__name__}: {error}"
            ) from error
        report = PassReport(current.name, +result.counts, time.perf_counter() - start)
        reports.append(report)
        _log_pass(gm, report)
        if observer is not None:
            observer.after_pass(report, gm)
    return reports


class _ConditionError(Exception):
    """A graph is not what a pass states."""


def _check_conditions(gm: fx.GraphModule, current: Pass, what: str) -> None:
    for condition in getattr(current, what, ()):
        node = condition.broken_by(gm)
        if node is not None:
            raise _ConditionError(f"it {what} that {condition.text}, and {node} does not")


def _finish(gm: fx.GraphModule) -> None:
    """Lints and recompiles a graph and the bodies of its higher-order ops."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
            module.recompile()


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

"""The passes in order, and the runner that lints, checks, times and logs each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.hooks import RemovableHandle

from amp_fx.errors import AmpFxError, OptionError, PassError, did_you_mean
from amp_fx.graphs.conditions import check_graph
from amp_fx.passes.base import PassReport
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.open_float32_products import OpenFloat32Products
from amp_fx.passes.quantize_products import QuantizeProducts
from amp_fx.passes.reject_opaque_nodes import RejectOpaqueNodes
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.passes.store_weights_low import StoreWeightsLow
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.passes.wrap_opaque_nodes import WrapOpaqueNodes
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.tracing import trace_structured
from amp_fx.weights.read_only import is_checking

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from amp_fx.graphs.records import AutocastSite
    from amp_fx.passes.base import Observer, Pass
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame


log = logging.getLogger("amp_fx.pipeline")
pass_log = logging.getLogger("amp_fx.passes")

PASSES: tuple[type[Pass], ...] = (
    InlineRegions,
    MarkRegions,
    InsertCasts,
    RestoreOutputs,
    QuantizeProducts,
    HoistCasts,
    FoldCasts,
    StoreWeightsLow,
    RejectOpaqueNodes,
    OpenFloat32Products,
    WidenOps,
    WrapOpaqueNodes,
)
"""All passes in the order in which they run. Some run only on exported programs."""


def default_passes(
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
        MarkRegions(site),
        InsertCasts(policy, frame, guards_range, flattens),
        *((RestoreOutputs(output_dtypes),) if restores_outputs else ()),
        *((quantizes,) if quantizes is not None else ()),
        HoistCasts(weights),
        FoldCasts(),
        WrapOpaqueNodes(),
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
        passes: The passes, in order.
        check: Whether to check the graph's invariants after every pass. The default is True if the
            environment variable ``AMP_FX_CHECK`` is ``1``.
        observer: Called after each pass.

    Raises:
        PassError: A pass failed, or a condition that it requires or ensures does not hold. The
            message names the pass and those that ran before it.
        AmpFxError: A pass rejected the graph.
        AssertionError: The graph violates an invariant after a pass (``check``).
    """
    is_checked = is_checking() if check is None else check
    reports: list[PassReport] = []
    for current in passes:
        start = time.perf_counter()
        try:
            _check_conditions(gm, current, "requires")
            interface = None if current.name in _BUILT_IN else _interface(gm.graph)
            result = current.call(gm)
            if interface is not None and interface != _interface(gm.graph):
                raise _ConditionError(_CHANGED)
            if result.modified:
                _finish(gm)
            _check_conditions(gm, current, "ensures")
        except AmpFxError:
            raise
        except Exception as error:
            before = ", ".join(report.name for report in reports) or "nothing"
            raise PassError(
                f"pass {current.name!r} failed after {before}: {type(error).__name__}: {error}"
            ) from error
        if is_checked:
            check_graph(gm, current.name)
        report = PassReport(current.name, +result.counts, time.perf_counter() - start)
        reports.append(report)
        _log_pass(gm, report)
        if observer is not None:
            observer.after_pass(report, gm)
    return reports


def _interface(graph: fx.Graph) -> tuple[list[str], str]:
    """Returns the names of the inputs, and the structure of the outputs, of a graph."""
    outputs = graph.find_nodes(op="output")
    structure = map_arg([node.args for node in outputs], lambda _: "value")
    return [node.name for node in graph.find_nodes(op="placeholder")], str(structure)


_CHANGED = (
    "it changed the inputs of the graph, or the number and structure of its outputs, which the "
    "program relies on"
)


class _ConditionError(Exception):
    """A graph does not meet a condition of a pass."""


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


DEFAULT_AFTER = "fold_casts"
_BUILT_IN = {kind.name: index for index, kind in enumerate(PASSES)}


@dataclasses.dataclass(frozen=True)
class AddedPass:
    """A pass that a user added, and the name of the pass before it."""

    added: Pass
    after: str = DEFAULT_AFTER


_registered: OrderedDict[str, AddedPass] = OrderedDict()


def register_pass(new: Pass, *, after: str = DEFAULT_AFTER) -> RemovableHandle:
    """Runs a pass over every graph that is compiled or explained from now on.

    Args:
        new: The pass (``amp_fx.passes.base.Pass``). It replaces a registered pass of the same name.
        after: The name of the pass to run after. In graphs where that pass does not run, the new
            pass runs at its position.

    Returns:
        A handle; its ``remove()`` unregisters the pass.

    Raises:
        OptionError: ``new`` is not a pass or has the name of a built-in one, or no pass is called
            ``after``.
    """
    check_pass("register_pass", new)
    if after not in _BUILT_IN and after not in _registered:
        raise OptionError(f"after={after!r}: {_no_such_pass(after, ())}")
    handle = RemovableHandle(_registered)
    handle.id = new.name  # type: ignore[assignment]
    _registered[new.name] = AddedPass(new, after)
    return handle


def check_pass(where: str, value: Any) -> None:
    """Raises ``OptionError`` if a value is not a pass or has the name of a built-in pass."""
    name = getattr(value, "name", None)
    if isinstance(value, type) or not isinstance(name, str) or not callable(_call_of(value)):
        raise OptionError(
            f"{where}: {value!r} is not a pass: give an object with a name and a method call(gm)"
        )
    if name in _BUILT_IN:
        raise OptionError(f"{where}: {name!r} is the name of a pass of amp_fx; give another one")


def _call_of(value: Any) -> Any:
    return getattr(value, "call", None)


def check_disabled(where: str, names: Iterable[str], added: Sequence[Pass]) -> None:
    """Raises ``OptionError`` for names of missing passes and of passes that results depend on."""
    for name in names:
        if name not in _BUILT_IN and name not in _registered and name not in _names(added):
            raise OptionError(f"{where}: {_no_such_pass(name, added)}")
        if any(kind.name == name and getattr(kind, "is_needed", False) for kind in PASSES):
            raise OptionError(f"{where}: results would be wrong without the pass {name!r}")


def _names(passes: Iterable[Pass]) -> list[str]:
    return [each.name for each in passes]


def _no_such_pass(name: str, added: Sequence[Pass]) -> str:
    known = [*_BUILT_IN, *_registered, *_names(added)]
    meant = did_you_mean(name, known)
    return f"there is no pass {name!r}; the passes are {', '.join(known)}{meant}"


def with_added(
    passes: Iterable[Pass], added: Sequence[Pass], disabled: Iterable[str]
) -> tuple[Pass, ...]:
    """Inserts registered and added passes, and removes disabled ones."""
    pipeline = list(passes)
    inserted: set[str] = set()
    for entry in [*_registered.values(), *map(AddedPass, added)]:
        position = _position(pipeline, entry.after)
        while position < len(pipeline) and pipeline[position].name in inserted:
            position += 1  # passes that were added earlier run earlier
        pipeline.insert(position, entry.added)
        inserted.add(entry.added.name)
    return tuple(each for each in pipeline if each.name not in disabled)


def _position(passes: Sequence[Pass], after: str) -> int:
    """Returns the position after a pass, or the position that the pass would have."""
    names = _names(passes)
    if after in names:
        return names.index(after) + 1
    rank = _BUILT_IN.get(after, _BUILT_IN[DEFAULT_AFTER])
    return max(
        (i + 1 for i, name in enumerate(names) if _BUILT_IN.get(name, rank) < rank), default=0
    )


def passes_of_users(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Returns the passes that are not built in."""
    return tuple(each for each in passes if each.name not in _BUILT_IN)


@contextlib.contextmanager
def in_cache_keys(passes: Iterable[Pass]) -> Iterator[None]:
    """Context manager that adds the user's passes to the keys of on-disk caches.

    Relies on ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    users = passes_of_users(passes)
    if not users:
        yield
        return
    from amp_fx.torch_private.aot_autograd import config as functorch_config

    config: Any = torch.compiler.config
    keys = [f"{each.name}={getattr(each, 'cache_key', '')}" for each in users]
    tag = " ".join(filter(None, [config.cache_key_tag, f"amp_fx: {'; '.join(keys)}"]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(cache_key_tag=tag))
        if cache_options(users):
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def cache_options(passes: Iterable[Pass]) -> dict[str, bool]:
    """Returns options that turn inductor's caches off if a pass has no ``cache_key``."""
    if all(each.name in _BUILT_IN or hasattr(each, "cache_key") for each in passes):
        return {}
    return {"fx_graph_cache": False, "fx_graph_remote_cache": False}

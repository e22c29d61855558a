"""Runs graphs that cannot be rewritten under native autocast, and warns of fallbacks."""

from __future__ import annotations

import functools
import logging
import traceback
from typing import TYPE_CHECKING

import torch
from torch import fx

from amp_fx.errors import first_line
from amp_fx.graphs.locations import location_of, target_name
from amp_fx.graphs.loops import restore_bodies
from amp_fx.graphs.markers import surround
from amp_fx.graphs.metadata import CAST
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.graphs.values import captured_dtype, remember_captured
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState

log = logging.getLogger("amp_fx.fallback")


def as_native_region(
    gm: fx.GraphModule, state: AutocastState, *, restores_outputs: bool
) -> fx.GraphModule:
    """Surrounds a captured graph with one native autocast region, in place."""
    inline_shared_bodies(gm)
    remember_captured(gm.graph)
    if restores_outputs:
        restore_bodies(gm)
    surround(gm.graph, state.markers())
    if restores_outputs:
        _restore_outputs(gm.graph)
    gm.recompile()
    return gm


def with_autocast_off(gm: fx.GraphModule, state: AutocastState) -> fx.GraphModule:
    """Surrounds a rewritten graph with a region in which autocast is off, in place.

    If AOTAutograd traces the graph in ``state``, autocast is on only in the backward.
    """
    dtypes = dict(state.low_dtypes)
    surround(gm.graph, [(d, dtypes[d], False, state.cache_enabled) for d in state.enabled])
    gm.recompile()
    return gm


def _restore_outputs(graph: fx.Graph) -> None:
    output = graph.output_node()
    for node in output.all_input_nodes:
        dtype = captured_dtype(node)
        if dtype is not None and dtype.is_floating_point:
            with graph.inserting_before(output):
                restored = graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
            output.replace_input_with(node, restored)


def warn_fallback(error: Exception, graph: fx.Graph, frame: CompileFrame = NO_FRAME) -> None:
    """Warns once per cause that a graph could not be rewritten."""
    head = "a graph runs under native autocast because it could not be rewritten"
    _warn_once(head, str(error), error, graph, frame)


def warn_transforms(error: Exception, graph: fx.Graph) -> None:
    """Warns once per cause that the transforms of a graph run without autocast."""
    head = "torch.func transforms run in the dtypes of the program, as they raise under autocast"
    _warn_once(head, str(error), error, graph)


def warn_eager(error: Exception, compiler: str, graph: fx.Graph, what: str = "graph") -> None:
    """Warns once per cause that a rewritten graph could not be compiled."""
    # Inductor names the op in the second line.
    targets = [line.strip() for line in str(error).strip().splitlines()[1:2] if "target:" in line]
    reason = ", ".join((first_line(error), *targets))
    head = f"a {what} runs op by op, with its casts, because it could not be compiled with"
    _warn_once(f"{head} {compiler!r}", reason, error, graph)


def watch_recompile_limit(root: str | None) -> None:
    """Warns once when Dynamo stops compiling the function that it compiles now.

    Dynamo then calls the function itself. Without a region, it runs in full precision.

    Args:
        root: The class name of the compiled module; None for a function.
    """
    from amp_fx.torch_private.dynamo import describe_frame

    frame = describe_frame()
    if frame is not None:
        _watch_all()
        _bare_frames[frame] = f"{root}: {frame}" if root else frame


_bare_frames: dict[str, str] = {}
"""The functions that were compiled outside of regions, with their names in the warning."""


@functools.cache
def _watch_all() -> None:
    from amp_fx.torch_private.dynamo import call_at_recompile_limit

    call_at_recompile_limit(_warn_recompile_limit)


def _warn_recompile_limit(frame: str, limit: str) -> None:
    name = _bare_frames.pop(frame, None)
    if name is not None:
        log.warning(
            "%s: calls that match none of its compiled variants run eagerly, without amp_fx, in "
            "full precision (float32), because it hit torch._dynamo.config.%s. Raise this limit, "
            'compile for all sizes (dynamic=True; TORCH_LOGS="recompiles" shows the reasons), or '
            "call it in a torch.autocast region, which also holds for eager code",
            name,
            limit,
        )


def _warn_once(
    head: str, reason: str, error: Exception, graph: fx.Graph, frame: CompileFrame = NO_FRAME
) -> None:
    if (head, reason) in _seen:
        return
    _seen.add((head, reason))
    log.warning(
        '%s: %s%s (TORCH_LOGS="+amp_fx" shows more; options={"fallback": False} raises instead)',
        head,
        reason,
        describe_location(error, graph, frame),
    )


_seen: set[tuple[str, str]] = set()


def describe_location(error: BaseException, graph: fx.Graph, frame: CompileFrame = NO_FRAME) -> str:
    """Describes the location of an error in the user's program: op, module path, source line.

    The location is that of the node being processed, else of a node that the message names, else of
    the first op of the graph.
    """
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    node = _node_in_traceback(error) or _named_node(str(error), calls)
    if node is not None:
        return f"; at {target_name(node)}{_location_text(node, frame)}"
    located = [node for node in calls if node.meta.get("stack_trace") and not _is_ours(node)]
    if not located:
        return ""
    first = located[0]
    return f"; in the graph that begins at {target_name(first)}{_location_text(first, frame)}"


def _is_ours(node: fx.Node) -> bool:
    return CAST.is_on(node) or str(node.target).startswith("amp_fx.")


def _node_in_traceback(error: BaseException) -> fx.Node | None:
    """Returns the innermost local variable ``node`` in the traceback of an error."""
    # Neither passes nor inductor attach the node to their errors, but both name the variable so.
    innermost = None
    current: BaseException | None = error
    while current is not None:
        frames = [frame for frame, _ in traceback.walk_tb(current.__traceback__)]
        nodes = [frame.f_locals.get("node") for frame in frames]
        nodes = [n for n in nodes if isinstance(n, fx.Node) and n.meta.get("stack_trace")]
        innermost = nodes[-1] if nodes else innermost
        current = current.__cause__
    return innermost


def _named_node(message: str, calls: list[fx.Node]) -> fx.Node | None:
    ops = [node for node in calls if isinstance(node.target, OpOverload)]
    return next((node for node in ops if str(node.target) in message), None)


def _location_text(node: fx.Node, frame: CompileFrame) -> str:
    location = location_of(node, frame)
    module = f" in {location.module}" if location.module else ""
    return module + (f" ({location.file}:{location.line})" if location.file else "")

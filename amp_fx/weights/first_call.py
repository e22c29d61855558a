"""The graph for the first call after weights were written: it casts them itself.

Where gradients flow and every update is followed by one call, a refresh of all copies before
the call would read and write memory once more than native autocast does, whose casts sit next
to the products that use them. So such a graph comes in two variants. The first casts inside and
hands the casts out as further outputs, which become the kept copies; the other takes the
copies, and is compiled when a call first finds them fresh.

On accelerators there is only the other: a refresh of all copies takes a launch or two there,
casts inside a launch each, and CUDA graphs want copies that keep their addresses.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.metadata import KEPT_INPUT, SITE
from amp_fx.graphs.values import analysis, detect_fake_mode, set_value, value_of
from amp_fx.weights.kept_cast import kept_cast, laid_out_as_before

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.weights.kept_cast import Slot

    Compiled = Callable[..., Any]


def slots_inside(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions, among the kept inputs, of those that a first call casts itself.

    Those are the copies of weights that gradients go to. There are none where shapes are
    symbolic: the other variant is compiled when no guard can be added any more.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if KEPT_INPUT.is_on(node)]
    if any(is_dynamic(value_of(node)) for node in placeholders):
        return ()
    if any(value_of(node).device.type != "cpu" for node in kept):
        return ()
    return tuple(i for i, node in enumerate(kept) if _is_trained(node, placeholders))


def is_dynamic(value: Any) -> bool:
    """Whether an input is a number, or a tensor whose shape is symbolic."""
    return not isinstance(value, torch.Tensor) or bool(free_symbols(value))


def _is_trained(node: fx.Node, placeholders: Sequence[fx.Node]) -> bool:
    slot = KEPT_INPUT.of(node)
    weight = value_of(placeholders[slot.source_index])
    laid_out = [user for user in node.users if user.target is laid_out_as_before]
    readers = [reader for read in (node, *laid_out) for reader in read.users]
    has_gradient = any(reader.target is kept_cast for reader in readers)
    return bool(weight.requires_grad and has_gradient and not slot.is_alias)


def with_casts_inside(
    gm: fx.GraphModule, inside: Sequence[int], passed: Sequence[int]
) -> fx.GraphModule:
    """A copy of a graph that casts weights itself and hands the casts out, behind its outputs.

    Args:
        gm: The graph; its kept inputs know their weights by ``KEPT_INPUT``.
        inside: What ``slots_inside`` gave.
        passed: Which of Dynamo's inputs the graph still takes, in order.
    """
    gm = copy_graph_module(gm)
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if KEPT_INPUT.is_on(node)]
    given = dict(zip(passed, placeholders, strict=False))
    place = {node: i for i, node in enumerate(graph.nodes)}
    casts = []
    with analysis(detect_fake_mode(graph), is_grad_enabled=False):
        for i in inside:
            # Kernels run in this order: what reads a cast finds it in the processor's cache.
            with graph.inserting_before(min(kept[i].users, key=place.__getitem__)):
                casts.append(_cast_inside(graph, kept[i], given))
    output = graph.output_node()
    (outputs,) = output.args
    assert isinstance(outputs, (tuple, list))
    output.args = ((*outputs, *casts),)
    graph.lint()
    gm.recompile()
    return gm


def without_kept_inputs(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that casts all weights itself, and takes Dynamo's inputs alone."""
    gm = copy_graph_module(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(enumerate(placeholders))
    kept = [node for node in placeholders if KEPT_INPUT.is_on(node)]
    with analysis(detect_fake_mode(gm.graph), is_grad_enabled=False):
        for node in kept:
            if KEPT_INPUT.of(node).is_alias:
                node.replace_all_uses_with(given[KEPT_INPUT.of(node).source_index])
                gm.graph.erase_node(node)
                continue
            with gm.graph.inserting_after(placeholders[-len(kept) - 1]):
                _cast_inside(gm.graph, node, given)
    gm.graph.lint()
    gm.recompile()
    return gm


def _cast_inside(graph: fx.Graph, kept: fx.Node, given: Mapping[int, fx.Node]) -> fx.Node:
    slot = KEPT_INPUT.of(kept)
    weight = given[slot.source_index]
    detached = graph.call_function(torch.ops.aten.detach.default, (weight,))
    set_value(detached, value_of(weight).detach())
    with graph.inserting_after(detached):
        cast = graph.call_function(
            torch.ops.aten._to_copy.default, (detached,), _like_the_copy(slot)
        )
    set_value(cast, value_of(kept))
    for node in (detached, cast):
        SITE.put(node, SITE.of(weight))
    kept.replace_all_uses_with(cast)
    graph.erase_node(kept)
    return cast


def _like_the_copy(slot: Slot) -> dict[str, Any]:
    if slot.memory_format is torch.preserve_format:
        return {"dtype": slot.dtype}
    return {"dtype": slot.dtype, "memory_format": slot.memory_format}


def compile_lock() -> AbstractContextManager[Any]:
    """Dynamo's: tracing is not safe next to another thread that traces.

    Relies on ``torch._dynamo.convert_frame.compile_lock``.
    """
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def is_alone() -> bool:
    """Whether no other thread can be calling anything compiled.

    While torch traces, such a thread is refused with an error, by a flag that all share
    (``torch.fx._symbolic_trace._is_fx_tracing_flag``).
    """
    current = threading.current_thread()
    return all(t is current or _is_housekeeping(t) for t in threading.enumerate())


def _is_housekeeping(thread: threading.Thread) -> bool:
    """Whether a thread belongs to a library that calls no model in it."""
    target = getattr(thread, "_target", None)
    modules = type(thread).__module__, getattr(target, "__module__", None) or ""
    return any(module.partition(".")[0] in _HOUSEKEEPERS for module in modules)


_HOUSEKEEPERS = frozenset(
    ("IPython", "ipykernel", "multiprocessing", "tensorboard", "torch", "tqdm", "wandb", "zmq")
)
"""Progress bars, notebooks, loggers, queues between processes, pinned memory."""


class CompiledLater:
    """A graph that is compiled when it is first called, which must be where ``is_alone``.

    Args:
        compile_graph: Compiles it for the inputs of that call.
    """

    def __init__(self, compile_graph: Callable[[Sequence[Any]], Compiled]) -> None:
        self._compile: Callable[[Sequence[Any]], Compiled] | None = compile_graph
        self._compiled: Compiled | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled is not None

    def __call__(self, *args: Any) -> Any:
        """Calls the graph."""
        if self._compiled is None:
            with compile_lock():
                if self._compile is not None:
                    self._compiled = self._compile(args)
                    self._compile = None
        assert self._compiled is not None
        return self._compiled(*args)

"""A graph in two variants: one casts weights itself, the other takes kept casts.

Where gradients flow and every update is followed by one call, keeping casts of weights gains
nothing: native autocast reads and writes no more memory, with its casts next to the products that
use them. So such a graph begins as the variant that casts, which is what native autocast compiles.
The other is compiled when a call first finds weights as the call before did; from there on copies
are kept, until some updates in a row were followed by one call again.

Whether weights are as they were is asked of the smallest one that is trained, by an alias of it,
which takes no memory. That is a guess of what pays; what is right does not depend on it.

On accelerators there is only the variant that takes copies: a refresh of all takes a launch or two
there, casts inside a launch each, and CUDA graphs want copies that keep their addresses.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_symbols

from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.metadata import KEPT_INPUT, SITE
from amp_fx.graphs.values import analysis, detect_fake_mode, set_value, value_of
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_cast import kept_cast, laid_out_as_before
from amp_fx.weights.kept_copies import CACHE, Uses, key_of, making_copies
from amp_fx.weights.write_signals import may_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.weights.cast_plan import Plan
    from amp_fx.weights.kept_cast import Slot

    Compiled = Callable[..., Any]


def slots_inside(gm: fx.GraphModule, passed: Sequence[int]) -> tuple[int, ...]:
    """Positions, among the kept inputs, of those that one of two variants casts itself.

    Those are the copies of weights that gradients go to. There are none where shapes are
    symbolic: the other variant is compiled when no guard can be added any more.

    Args:
        gm: The graph; its kept inputs know their weights by ``KEPT_INPUT``.
        passed: Which of Dynamo's inputs the graph still takes, in order.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if KEPT_INPUT.is_on(node)]
    if any(is_dynamic(value_of(node)) for node in placeholders):
        return ()
    if any(value_of(node).device.type != "cpu" for node in kept):
        return ()
    given = dict(zip(passed, placeholders, strict=False))
    return tuple(i for i, node in enumerate(kept) if _is_trained(node, given))


def is_dynamic(value: Any) -> bool:
    """Whether an input is a number, or a tensor whose shape is symbolic."""
    return not isinstance(value, torch.Tensor) or bool(free_symbols(value))


def _is_trained(node: fx.Node, given: Mapping[int, fx.Node]) -> bool:
    slot = KEPT_INPUT.of(node)
    if slot.source_index not in given:
        return False  # no gradient goes to it
    weight = value_of(given[slot.source_index])
    laid_out = [user for user in node.users if user.target is laid_out_as_before]
    readers = [reader for read in (node, *laid_out) for reader in read.users]
    has_gradient = any(reader.target is kept_cast for reader in readers)
    return bool(weight.requires_grad and has_gradient and not slot.is_alias)


def with_casts_inside(
    gm: fx.GraphModule, inside: Sequence[int], passed: Sequence[int]
) -> fx.GraphModule:
    """A copy of a graph that casts weights itself.

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
    with analysis(detect_fake_mode(graph), is_grad_enabled=False):
        for i in inside:
            # Kernels run in this order: what reads a cast finds it in the processor's cache.
            with graph.inserting_before(min(kept[i].users, key=place.__getitem__)):
                _cast_inside(graph, kept[i], given)
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


def _cast_inside(graph: fx.Graph, kept: fx.Node, given: Mapping[int, fx.Node]) -> None:
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
    harmless = {threading.current_thread(), *_kernel_compilers()}
    return all(t in harmless or _is_housekeeping(t) for t in threading.enumerate())


def _kernel_compilers() -> set[threading.Thread]:
    """The threads in which inductor waits for C++ compilers; they stay when all is compiled.

    Relies on ``AsyncCompile.pool`` of ``torch._inductor.async_compile``, which is cached, and on
    ``ThreadPoolExecutor._threads``.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return set()
    return set(module.AsyncCompile.pool()._threads)


def _is_housekeeping(thread: threading.Thread) -> bool:
    """Whether a thread belongs to a library that calls no model in it."""
    target = getattr(thread, "_target", None) or getattr(thread, "function", None)
    modules = type(thread).__module__, getattr(target, "__module__", None) or ""
    return any(module.partition(".")[0] in _HOUSEKEEPERS for module in modules)


_HOUSEKEEPERS = frozenset(
    (
        *("IPython", "execnet", "ipykernel", "multiprocessing", "pytest_timeout", "tensorboard"),
        *("torch", "tqdm", "wandb", "zmq"),
    )
)
"""Progress bars, notebooks, loggers, timers of tests, queues between processes, pinned memory."""


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


MOST_UNUSED = 2
"""Updates in a row after which copies that no second call took are kept no more."""

MOST_PATIENCE = 1024
"""Calls in a row that have to find weights unchanged, at most, before copies are kept once more."""


class TwoVariants:
    """A compiled graph that casts weights, or takes kept casts where that saves any.

    Args:
        keeping: The kept casts of the variant that takes them all.
        inside: The positions of those that the other casts itself (``slots_inside``).
        canary: An alias of one of these weights: what tells whether they were written.
        casting: The variant that casts; it takes the inputs that are passed, and the other copies.
        taking: The variant that takes copies.
    """

    def __init__(
        self,
        keeping: Plan,
        inside: Sequence[int],
        canary: Slot,
        casting: Compiled,
        taking: CompiledLater,
    ) -> None:
        self.keeping, self.inside = keeping, tuple(inside)
        self.casting, self.taking = casting, taking
        outside = [slot for i, slot in enumerate(keeping.slots) if i not in self.inside]
        self._cast = keeping.of(outside).wrap(casting) if outside else self._given(casting)
        self._take = keeping.verifying(self._call_taking)
        self._canary = _Canary(canary, keeping)
        self._is_keeping = False
        self._uses = Uses(MOST_UNUSED)
        self._num_unchanged = 0
        self._patience = 1  # calls in a row that have to find weights unchanged

    def __call__(self, *args: Any) -> Any:
        """Calls the graph with the inputs that Dynamo knows."""
        return self._take(*args) if self._is_keeping else self._call_casting(args)

    def _call_casting(self, args: tuple[Any, ...]) -> Any:
        is_unchanged = self._canary.enter(args)
        try:
            if is_unchanged and self._shall_keep(args):
                self._is_keeping = True
                return self._take(*args)
            self._num_unchanged *= is_unchanged
            return self._cast(*args)
        finally:
            self._canary.leave()

    def _given(self, casting: Compiled) -> Compiled:
        passed = self.keeping.passed
        return lambda *args: casting(*[args[i] for i in passed])

    def _shall_keep(self, args: tuple[Any, ...]) -> bool:
        """Whether a call that finds weights unchanged is to be the first that takes copies."""
        self._num_unchanged += 1
        if self._num_unchanged < self._patience:
            return False
        return self.taking.is_ready or _may_compile(args)

    def _call_taking(self, *args: Any) -> Any:
        look = self.keeping.look
        inputs = look.enter(args)
        if inputs is None:
            if not self._are_used(args):
                self._give_up(args)
                return self._call_casting(args)
            inputs = self.keeping.prepare(args)
        try:
            return self.taking(*inputs)
        finally:
            look.leave()

    def _are_used(self, args: tuple[Any, ...]) -> bool:
        """Whether copies that are stale were taken a second time; the largest stands for all."""
        slots = [self.keeping.slots[i] for i in self.inside]
        slot = max(slots, key=lambda slot: args[slot.source_index].numel())
        kept = CACHE.copies.get(key_of(slot, args[slot.source_index]))
        return kept is None or self._uses.is_used(kept)

    def _give_up(self, args: tuple[Any, ...]) -> None:
        self._is_keeping = False
        self._num_unchanged = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        with CACHE.exclusive() as is_first:
            for i in self.inside if is_first else ():
                slot = self.keeping.slots[i]
                key = key_of(slot, args[slot.source_index])
                if key in CACHE.copies:
                    CACHE.drop(key)


class _Canary:
    """Whether weights are as they were at the call before, by an alias of one of them.

    Args:
        slot: The alias.
        plan: The kept casts of the graph that is called.
    """

    def __init__(self, slot: Slot, plan: Plan) -> None:
        self._slot, self._owner = slot, plan.owner
        self._look = engine().Look((slot.source_index,), (), plan.is_pure, False)
        self.leave = self._look.leave  # takes a pure graph's reads of weights for what they are

    def enter(self, args: tuple[Any, ...]) -> bool:
        """Begins a call; whether no signal tells of a write since the last."""
        if self._look.enter(args) is not None:
            return True
        with CACHE.exclusive() as is_first:
            if is_first and self._refresh(args) is None:
                self._remember(args)
            self._look.begin()
        return False

    def _refresh(self, args: tuple[Any, ...]) -> Any:
        return self._look.refresh(args, may_watch(), False)

    def _remember(self, args: tuple[Any, ...]) -> None:
        with CACHE.moving(), making_copies():
            copy = CACHE.copy_of(self._slot, args[self._slot.source_index], self._owner)
            if copy is not None:
                self._look.remember((copy,))
                self._refresh(args)


def _may_compile(args: tuple[Any, ...]) -> bool:
    """Whether compiling disturbs no other thread, nor Dynamo's ``DDPOptimizer``.

    That calls with fake tensors what it has compiled, to learn of its outputs, and counts
    how often AOTAutograd is called.
    """
    return is_alone() and not any(isinstance(a, FakeTensor) for a in args)


def canary_of(gm: fx.GraphModule, plan: Plan, inside: Sequence[int]) -> Slot:
    """An alias of the smallest weight that a variant casts itself.

    Args:
        gm: The graph that takes all copies, and nothing that the plan does not pass.
        plan: Its kept casts.
        inside: What ``slots_inside`` gave.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(zip(plan.passed, placeholders, strict=False))
    slots = [plan.slots[i] for i in inside]
    slot = min(slots, key=lambda slot: value_of(given[slot.source_index]).numel())
    dtype = value_of(given[slot.source_index]).dtype
    return dataclasses.replace(
        slot, dtype=dtype, is_alias=True, memory_format=torch.preserve_format
    )

"""Sends a stand-in through Dynamo and the backend, and leaves no trace of that in Dynamo."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import pgo
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters

from amp_fx.backend.entry import called_in
from amp_fx.backend.rewrite import rewrite, start_state
from amp_fx.explanation.recorder import GraphRecorder, SeenGraph
from amp_fx.graphs.values import plain_inputs
from amp_fx.options import Options
from amp_fx.regions.state import no_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import CodeType

    from torch import fx

    from amp_fx.explanation.stand_in import StandIn


@dataclasses.dataclass
class Capture:
    """What Dynamo gave.

    Attributes:
        graphs: The graphs, in the order of capture.
        other_breaks: Reasons of graph breaks that no graph ends with.
        is_whole: Whether one graph is all that the call did.
        outputs: What it gave.
    """

    graphs: list[SeenGraph]
    other_breaks: list[str]
    is_whole: bool
    outputs: Any

    def release(self) -> None:
        """Lets the graphs go: entries in Dynamo's cache outlive the call."""
        for graph in self.graphs:
            vars(graph).clear()
        self.graphs.clear()
        self.outputs = None


def run_stand_in(
    stand_in: StandIn,
    options: Mapping[str, Any],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    wants_backward: bool,
    wants_kernels: bool = False,
    watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Capture:
    """Captures the graphs of one call."""
    seen: list[SeenGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if stand_in.imagined:
            _move_regions(gm, stand_in.device_type)
        parsed = Options.parse(options)
        seen.append(SeenGraph(gm, start_state(gm, parsed)))
        compiled_with = dataclasses.replace(parsed, compiler="inductor")
        recorder = GraphRecorder(
            seen[-1],
            wants_backward=wants_backward,
            options=compiled_with,
            is_imagined=stand_in.imagined,
            wants_kernels=wants_kernels,
        )
        found = rewrite(gm, plain_inputs(example_inputs), parsed, recorder)
        with no_autocast():
            run = called_in(watch, recorder.finish(found, example_inputs))
            return called_in(no_autocast, run)

    before = Counter(counters["graph_break"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(_sizes_forgotten())
        stack.enter_context(_without_limit())
        stack.enter_context(_forgotten(backend))
        if stand_in.fake_mode is not None:
            stack.enter_context(stand_in.fake_mode)
        stack.enter_context(region())
        outputs = optimized(backend)(stand_in.program)(*stand_in.args, **stand_in.kwargs)
    new = Counter(counters["graph_break"]) - before
    counters["graph_break"] = before
    reasons: list[Any] = [graph.captured.compile_subgraph_reason for graph in seen]
    ended = Counter(str(reason.reason) for reason in reasons if reason.graph_break)
    is_whole = not new and _is_all(seen, stand_in.program)
    return Capture(seen, [*(new - ended).elements()], is_whole, outputs)


def _is_all(seen: Sequence[SeenGraph], program: Callable[..., Any]) -> bool:
    """Whether a single graph was captured, from the program's own frame.

    Dynamo runs a frame that it skips as it is, without a graph break, and captures what that
    calls. Hooks of the outermost module are frames of their own.
    """
    if len(seen) != 1 or seen[0].fallback:
        return False
    frame = seen[0].frame
    if isinstance(program, torch.nn.Module):
        is_own = frame.root is program and len(frame.stack) == 1
        return is_own and not has_hooks(program)
    return frame.function is not None and frame.function is getattr(program, "__code__", None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module runs more than its ``forward``, hooks of all modules included.

    Relies on ``nn.Module._call_impl`` looking at these dictionaries.
    """
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own) or torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compiles what is compiled inside as if for the first time, and forgets it afterwards.

    Relies on ``isolate_recompiles`` of ``torch._dynamo.optimize``, where torch has that.
    """
    before = Counter(counters["graph_break"])
    try:
        with _sizes_forgotten(), _without_limit():
            yield
    finally:
        counters["graph_break"] = before


@contextlib.contextmanager
def _sizes_forgotten() -> Iterator[None]:
    """Keeps Dynamo from taking sizes for dynamic that differ from those explained.

    Relies on ``torch._dynamo.pgo`` keeping what it has seen in one dictionary.
    """
    state = pgo.get_code_state()
    before = copy.deepcopy(state)
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def _without_limit() -> contextlib.AbstractContextManager[None]:
    """Lets a program be explained however often it was compiled (see ``optimized``)."""
    without: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize
    )
    return without


def optimized(backend: Any, **kwargs: Any) -> Any:
    """``torch._dynamo.optimize`` with entries of its own in Dynamo's cache, where torch has that.

    Relies on ``isolate_recompiles``, which torch 2.11 lacks: there, explaining a function uses
    up one of the recompilations (``torch._dynamo.config.recompile_limit``) that it may have.
    """
    try:
        return torch._dynamo.optimize(backend, isolate_recompiles=True, **kwargs)
    except TypeError:
        return torch._dynamo.optimize(backend, **kwargs)


@contextlib.contextmanager
def _forgotten(backend: Any) -> Iterator[None]:
    """Invalidates what was compiled with a backend, where it has no region of its own.

    Relies on a cache entry knowing its backend, and on what a guard does when its object
    dies: ``extra_state.invalidate``.
    """
    codes: set[CodeType] = set()

    def note(code: CodeType, new_code: CodeType) -> None:  # noqa: ARG001
        codes.add(code)

    handle = register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for code in codes:
            _forget(code, backend)


def _forget(code: CodeType, backend: Any) -> None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for entry in _cache_entries(code, backend):
        manager: Any = entry.guard_manager
        if manager.extra_state is not None:
            deleted: Any = DeletedGuardManagerWrapper("explained")
            manager.extra_state.invalidate(entry, deleted)


def _cache_entries(code: CodeType, backend: Any) -> list[Any]:
    """Entries of the default region, as older torches have it, that a backend made."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries: list[Any] = _debug_get_cache_entry_list(code)
    return [
        entry
        for entry in entries
        if getattr(entry.backend, "_torchdynamo_orig_backend", entry.backend) is backend
    ]


def _move_regions(gm: fx.GraphModule, device_type: str) -> None:
    """Lets regions for an imagined device be regions for the CPU, which stands for it."""
    from torch.amp.autocast_mode import _enter_autocast

    for node in gm.graph.find_nodes(op="call_function", target=_enter_autocast):
        if node.args[0] != device_type:
            continue
        dtype = node.args[1] if len(node.args) > 1 else None
        node.args = ("cpu", dtype or torch.get_autocast_dtype(device_type), *node.args[2:])

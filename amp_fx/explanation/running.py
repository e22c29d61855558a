"""Sends a stand-in through Dynamo and the backend, and leaves no trace of that in Dynamo."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters

from amp_fx.backend import amp_fx, bare_state
from amp_fx.explanation.recorder import GraphRecorder, SeenGraph
from amp_fx.options import Options
from amp_fx.recording import recorded_by
from amp_fx.regions import AutocastState

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
    """

    graphs: list[SeenGraph]
    other_breaks: list[str]


def run_stand_in(
    stand_in: StandIn,
    options: Mapping[str, Any],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    wants_backward: bool,
) -> Capture:
    """Captures the graphs of one call.

    Args:
        stand_in: What to call.
        options: Options of the backend.
        region: Makes the region that the call runs in.
        wants_backward: Whether backward graphs are derived too.
    """
    seen: list[SeenGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if stand_in.imagined:
            _move_regions(gm, stand_in.device_type)
        ambient = AutocastState.ambient()
        parsed = Options.parse(options)
        state = ambient if ambient.enabled else bare_state(gm, ambient, parsed)
        seen.append(SeenGraph(gm, state))
        with recorded_by(GraphRecorder(seen[-1], wants_backward=wants_backward)):
            return amp_fx(gm, example_inputs, options=options)

    before = Counter(counters["graph_break"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(dynamo_config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(_forgotten(backend))
        if stand_in.fake_mode is not None:
            stack.enter_context(stand_in.fake_mode)
        stack.enter_context(region())
        _optimize(backend)(stand_in.program)(*stand_in.args, **stand_in.kwargs)
    new = Counter(counters["graph_break"]) - before
    counters["graph_break"] = before
    reasons: list[Any] = [graph.captured.compile_subgraph_reason for graph in seen]
    ended = Counter(str(reason.reason) for reason in reasons if reason.graph_break)
    return Capture(seen, [*(new - ended).elements()])


def _optimize(backend: Any) -> Any:
    """``torch.compile`` with entries of its own in Dynamo's cache, where torch has that."""
    kwargs: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch._dynamo.optimize).parameters:
        kwargs["isolate_recompiles"] = True
    return torch._dynamo.optimize(backend, **kwargs)


@contextlib.contextmanager
def _forgotten(backend: Any) -> Iterator[None]:
    """Takes out of Dynamo's cache what was compiled with a backend.

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
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for entry in _debug_get_cache_entry_list(code):
        owner: Any = entry.backend
        if getattr(owner, "_torchdynamo_orig_backend", owner) is not backend:
            continue
        manager: Any = entry.guard_manager
        if manager.extra_state is not None:
            deleted: Any = DeletedGuardManagerWrapper("explained")
            manager.extra_state.invalidate(entry, deleted)


def _move_regions(gm: fx.GraphModule, device_type: str) -> None:
    """Lets regions for an imagined device be regions for the CPU, which stands for it."""
    from torch.amp.autocast_mode import _enter_autocast

    for node in gm.graph.find_nodes(op="call_function", target=_enter_autocast):
        if node.args[0] != device_type:
            continue
        dtype = node.args[1] if len(node.args) > 1 else None
        node.args = ("cpu", dtype or torch.get_autocast_dtype(device_type), *node.args[2:])

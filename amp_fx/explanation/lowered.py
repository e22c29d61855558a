"""The graphs that inductor would get: what they save for the backward, and what they send."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.backend.inner import through_inductor
from amp_fx.dtypes import dtype_name
from amp_fx.explanation.kernels import scheduled_kernels
from amp_fx.explanation.records import CollectiveRecord, SavedRecord
from amp_fx.graphs.collectives import collectives_in
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.places import op_name, place_of
from amp_fx.graphs.traffic import num_bytes
from amp_fx.passes.narrow_gathers import NarrowGathers
from amp_fx.regions.state import no_autocast
from amp_fx.weights.kept_inputs import example_copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from amp_fx.explanation.records import KernelRecord
    from amp_fx.graphs.collectives import Collective
    from amp_fx.options import Options
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoweredGraph:
    """A graph of AOTAutograd, as inductor gets it.

    Attributes:
        gm: The graph.
        is_backward: Whether it is a backward.
        collectives: What it sends, each as it was and as ``narrow_gathers`` left it.
        kernels: The kernels that inductor would make of it, if they were asked for.
    """

    gm: fx.GraphModule
    is_backward: bool
    collectives: tuple[tuple[Collective, Collective], ...]
    kernels: tuple[KernelRecord, ...] = ()


def lowered_graphs(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    *,
    is_grad_enabled: bool,
    wants_kernels: bool,
) -> tuple[LoweredGraph, ...]:
    """The graphs that inductor would get of a rewritten one; no code is generated.

    To be called when Dynamo has ended: inductor's patterns make symbols for sizes, of which Dynamo
    would make guards.

    Returns:
        The forward, and the backward if there is one; nothing where inductor cannot take it.
    """
    found: list[LoweredGraph] = []

    def keep(graph: fx.GraphModule, given: Any, **kwargs: Any) -> Any:
        sent = _sent(graph, narrows=options.narrow_gathers)
        own = fx.GraphModule(graph, copy.copy(graph.graph))  # inductor edits the graph it gets
        kernels = scheduled_kernels(graph, given, **kwargs) if wants_kernels else ()
        found.append(LoweredGraph(own, bool(kwargs.get("is_backward")), sent, kernels))
        return _Uncalled()

    try:
        with _at_once(), no_autocast(), torch.set_grad_enabled(is_grad_enabled):
            through_inductor(gm, [*inputs, *_copies(gm, inputs)], options, keep)
    except Exception as error:  # it is explained without
        log.warning("inductor rejects the graph, so what it saves is unknown: %s", error)
        log.debug("not lowered", exc_info=True)
        return ()
    return tuple(found)


def _copies(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of weights, of the fake mode that other inputs have, if they have one."""
    with detect_fake_mode(inputs) or FakeTensorMode():
        return example_copies(gm, inputs)


class _Uncalled:
    """Stands for a compiled graph that nobody calls."""

    _boxed_call = True

    def __call__(self, _: list[Any]) -> Any:
        """Is not called."""
        raise AssertionError("an explained graph is not run")


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Has AOTAutograd hand the backward on at once, and take nothing from its cache.

    Relies on ``force_non_lazy_backward_lowering`` and ``enable_autograd_cache``.
    """
    from torch._functorch import config

    settings = {
        "force_non_lazy_backward_lowering": True,
        "enable_autograd_cache": False,
        "enable_remote_autograd_cache": False,
    }
    with config.patch(settings):
        yield


def _sent(gm: fx.GraphModule, *, narrows: bool) -> tuple[tuple[Collective, Collective], ...]:
    """What a graph sends, before and after ``narrow_gathers``, which runs here."""
    before = list(collectives_in(gm.graph))
    if before and narrows:
        NarrowGathers().call(gm)
    return tuple(zip(before, collectives_in(gm.graph), strict=True))


def sent_by(lowered: Iterable[LoweredGraph], *, is_backward: bool) -> tuple[CollectiveRecord, ...]:
    """The collectives of the forward or the backward of a graph."""
    pairs = [p for g in lowered if g.is_backward == is_backward for p in g.collectives]
    return tuple(
        CollectiveRecord(
            name=after.node.name,
            op=after.op,
            dtype=dtype_name(after.dtype) if after.dtype is not None else "",
            group_size=after.group_size,
            num_bytes=after.num_bytes,
            wire_bytes=after.wire_bytes,
            num_bytes_before=before.num_bytes,
            wire_bytes_before=before.wire_bytes,
        )
        for before, after in pairs
    )


def kernels_of(lowered: Iterable[LoweredGraph], *, is_backward: bool) -> tuple[KernelRecord, ...]:
    """The kernels of the forward or the backward of a graph."""
    return tuple(k for g in lowered if g.is_backward == is_backward for k in g.kernels)


def saved_for_backward(
    lowered: Iterable[LoweredGraph], frame: CompileFrame
) -> tuple[SavedRecord, ...]:
    """What the forward saves for the backward, but for inputs of the graph.

    Relies on AOTAutograd naming the inputs of a backward as the forward does what it saves, and
    inputs of the program ``primals`` and gradients ``tangents``.
    """
    graphs = {graph.is_backward: graph.gm.graph for graph in lowered}
    if True not in graphs:
        return ()
    made = {node.name: node for node in graphs[False].nodes}
    placeholders = graphs[True].find_nodes(op="placeholder")
    saved = [n for n in placeholders if not n.name.startswith(("primals", "tangents"))]
    return tuple(_saved(n, made.get(n.name, n), frame) for n in saved if _is_tensor(n))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(VALUE.get(node), torch.Tensor)


def _saved(node: fx.Node, maker: fx.Node, frame: CompileFrame) -> SavedRecord:
    value: torch.Tensor = VALUE.of(node)
    return SavedRecord(
        name=node.name,
        op=op_name(maker),
        module=place_of(maker, frame).module,
        dtype=dtype_name(value.dtype),
        shape=tuple(s if isinstance(s, int) else str(s) for s in value.shape),
        num_bytes=num_bytes(value),
    )

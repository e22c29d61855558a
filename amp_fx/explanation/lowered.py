"""The graphs that inductor would get: what they save for the backward, and what they send."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.inner import compile_graph, through_inductor, without_autograd_cache
from amp_fx.dtypes import dtype_name
from amp_fx.explanation.records import CollectiveRecord, KernelRecord, SavedRecord
from amp_fx.graphs.collectives import collectives_in
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.places import op_name, place_of
from amp_fx.graphs.traffic import num_bytes, tensor_bytes
from amp_fx.passes.narrow_gathers import NarrowGathers
from amp_fx.regions.state import no_autocast
from amp_fx.replaced import replaced
from amp_fx.weights.split import viewed_by

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Mapping, Sequence

    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger(__name__)

GENERATED, EXTERN = "generated", "extern"
CAST, LAYOUT = "cast", "layout"
CACHED_SUFFIX = "_cached"
"""How ``amp_fx.weights.split.split`` ends the names of cached values among the inputs."""


class _ScheduledError(Exception):
    """All is known: no code is wanted."""


def scheduled_kernels(
    gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> tuple[KernelRecord, ...]:
    """The kernels that inductor would make of a graph of AOTAutograd; it is edited.

    Relies on ``Scheduler.codegen`` having its final nodes in ``nodes``.
    """
    from torch._inductor import config, scheduler

    found: list[KernelRecord] = []
    was_scheduled = []

    def counted(this: Any) -> None:
        found.extend(k for node in this.nodes if (k := kernel_of(node)) is not None)
        was_scheduled.append(True)
        raise _ScheduledError

    settings = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "max_autotune": False,
        "max_autotune_gemm": False,
        "max_autotune_pointwise": False,
    }
    with replaced((scheduler.Scheduler, "codegen", counted)), config.patch(settings):
        try:
            compile_graph(gm, inputs, **kwargs)
        except Exception:
            if not was_scheduled:
                raise
    return tuple(found)


def kernel_of(node: Any) -> KernelRecord | None:
    """What one node of the scheduler becomes; None for what runs nothing."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode):
        return None
    num_bytes = int(node.get_read_write_buffers_sizes()) + _constant_bytes(node)
    if isinstance(node, ExternKernelSchedulerNode):
        if isinstance(node.node, MultiOutput):
            return None
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        return KernelRecord(EXTERN, str(name), num_bytes)
    return KernelRecord(_kind_of(node), _origins_of(node), num_bytes)


def _constant_bytes(node: Any) -> int:
    """What a kernel reads of constants, at most all: inductor counts inputs and buffers only.

    As there, an element of the kernel's ranges reads one of each.
    """
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    names = [dep.name for dep in node.read_writes.reads if dep.name in V.graph.constants]
    constants = {name: V.graph.constants[name] for name in names}
    sizes = {name: tensor_bytes(x) // x.element_size() for name, x in constants.items()}
    if isinstance(node, SchedulerNode):
        ranges = [
            int(V.graph.sizevars.optimization_hint(n)) for part in node.get_ranges() for n in part
        ]
        sizes = {n: min(size, names.count(n) * math.prod(ranges)) for n, size in sizes.items()}
    return sum(size * constants[name].element_size() for name, size in sizes.items())


def _origins_of(node: Any) -> str:
    origins = {o for part in node.get_nodes() if part.node for o in part.node.get_origins()}
    targets = {o.target for o in origins if o.op == "call_function"}
    return "+".join(sorted({getattr(target, "__name__", str(target)) for target in targets}))


_MOVES = frozenset({"load", "store", "to_dtype", "get_index", "index_expr", "output"})
"""What the loop of a kernel does that computes nothing."""


def _kind_of(node: Any) -> str:
    """Whether a generated kernel computes, only casts, or only copies."""
    from torch._inductor.virtualized import V

    bodies = [getattr(part, "_body", None) for part in node.get_nodes()]
    if any(body is None or not body.op_counts.keys() <= _MOVES for body in bodies):
        return GENERATED
    touched = node.read_writes.reads | node.read_writes.writes
    return LAYOUT if len({V.graph.get_dtype(dep.name) for dep in touched}) == 1 else CAST


@dataclasses.dataclass(frozen=True)
class LoweredGraph:
    """A graph of AOTAutograd, as inductor gets it."""

    gm: fx.GraphModule
    is_backward: bool
    collectives: tuple[CollectiveRecord, ...]
    kernels: tuple[KernelRecord, ...]


def lowered_graphs(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    cache: Caching,
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

    # Weights may have no data, and nothing is compiled.
    cache = dataclasses.replace(cache, is_packable=False, is_counted=False)
    try:
        with (
            at_once(),
            no_autocast(),
            torch.set_grad_enabled(is_grad_enabled),
            cache.partitioning(),
        ):
            through_inductor(gm, inputs, options, cache.wrap(keep))
    except Exception as error:  # it is explained without
        log.warning("inductor rejects the graph, so what it saves is unknown: %s", error)
        log.debug("not lowered", exc_info=True)
        return ()
    return tuple(found)


class _Uncalled:
    """Stands for a compiled graph that nobody calls."""

    _boxed_call = True

    def __call__(self, _: list[Any]) -> Any:
        """Is not called."""
        raise AssertionError("an explained graph is not run")


def at_once() -> contextlib.AbstractContextManager[None]:
    """Has AOTAutograd hand the backward on at once, and take nothing from its cache.

    Relies on ``force_non_lazy_backward_lowering`` and ``enable_autograd_cache``.
    """
    return without_autograd_cache(force_non_lazy_backward_lowering=True)


def _sent(gm: fx.GraphModule, *, narrows: bool) -> tuple[CollectiveRecord, ...]:
    """What a graph sends, before and after ``narrow_gathers``, which runs here."""
    all_before = list(collectives_in(gm.graph))
    if all_before and narrows:
        NarrowGathers().call(gm)
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
        for before, after in zip(all_before, collectives_in(gm.graph), strict=True)
    )


def saved_for_backward(
    lowered: Iterable[LoweredGraph], frame: CompileFrame
) -> tuple[SavedRecord, ...]:
    """Returns what the forward saves for the backward, without inputs and cached values.

    Relies on AOTAutograd naming the inputs of a backward as the forward names what it saves, and
    inputs of the program ``primals`` and gradients ``tangents``.
    """
    graphs = {graph.is_backward: graph.gm.graph for graph in lowered}
    if True not in graphs:
        return ()
    made = {node.name: node for node in graphs[False].nodes}
    placeholders = graphs[True].find_nodes(op="placeholder")
    saved = [
        node
        for node in placeholders
        if not node.name.startswith(("primals", "tangents")) and not _is_cached(node.name, made)
    ]
    return tuple(_saved(n, made.get(n.name, n), frame) for n in saved if _is_tensor(n))


def _is_cached(name: str, made: Mapping[str, fx.Node]) -> bool:
    """Returns True for a cached value, which ``split`` makes an input, and for a view of one."""
    if name not in made:
        return f"{name}{CACHED_SUFFIX}" in made
    source = viewed_by(made[name])
    return source.op == "placeholder" and source.name.endswith(CACHED_SUFFIX)


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

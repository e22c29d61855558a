"""Records of captured graphs: what was rewritten, and what their code caches."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx import csrc
from amp_fx.backend.compilers import plan_graphs
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.disk_caches import without_autograd_cache
from amp_fx.backend.lower import find_cached
from amp_fx.dtypes import dtype_name
from amp_fx.explanation.reading import read_graph
from amp_fx.explanation.records import CachedValueRecord
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.locations import input_path, module_types
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import remember_captured, storage_id
from amp_fx.passes.low_reads import low_reads
from amp_fx.regions.state import no_autocast
from amp_fx.weights.aliases import viewed_by
from amp_fx.weights.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch import fx

    from amp_fx.backend.lower import Caching
    from amp_fx.explanation.records import GraphRecord
    from amp_fx.explanation.running import CapturedGraph
    from amp_fx.options import Options
    from amp_fx.weights.plan import CachePlan

log = logging.getLogger(__name__)


def read_captured(
    graphs: Iterable[CapturedGraph],
    options: Options,
    device: str | None,
    *,
    foreign_ids: Collection[int] = (),
    wants_backward: bool,
) -> Iterator[GraphRecord]:
    """Yields records of captured graphs; each forward is followed by its backward.

    Must be called after Dynamo has finished: inductor's patterns create symbols for sizes, and
    Dynamo would create guards for these symbols.

    Args:
        graphs: The graphs.
        options: Options of the backend.
        device: The device type that the CPU represents, or None.
        foreign_ids: Identities of the weights whose memory torch did not allocate.
        wants_backward: Whether backward graphs are derived.
    """
    if device is not None:  # the rules of the accelerator apply
        options = dataclasses.replace(options, freezing=False)
    for index, graph in enumerate(graphs):
        rewritten = graph.rewritten
        inputs = Inputs.of(graph.gm, graph.inputs)
        with no_autocast(), torch.set_grad_enabled(graph.is_grad_enabled):
            caching = find_cached(
                inputs, rewritten, options, can_watch=can_watch, foreign_ids=foreign_ids
            )
            plans = [] if caching is None else _plan(graph, caching)
            backward = _derive_backward(graph, caching) if wants_backward else None
        state, frame = rewritten.state, rewritten.frame
        forward = read_graph(
            rewritten.gm,
            state,
            frame,
            index=index,
            device=device,
            fallback=graph.fallback,
            reads={} if graph.fallback else low_reads(rewritten.gm),
            cached=_cached_casts(rewritten.gm, plans),
        )
        reason: Any = graph.gm.compile_subgraph_reason
        stack = reason.user_stack if reason.graph_break else ()
        paths = [input_path(node, frame) for node in inputs.nodes]
        yield dataclasses.replace(
            forward,
            counts=tuple(sorted(sum((r.counts for r in rewritten.reports), Counter()).items())),
            modules=tuple(module_types(graph.gm, frame).items()),
            break_reason=first_lines(str(reason.reason)) if reason.graph_break else "",
            break_at=f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "",
            cached_values=tuple(_cached_values(plans, paths)),
            uncached=tuple((n, why) for plan in plans for n, why in plan.uncached.items()),
        )
        if backward is not None:
            remember_captured(backward.graph)
            yield read_graph(backward, state, frame, index=index, stage="backward", device=device)


def can_watch() -> bool:
    """Returns True if ``watch.cpp`` is built or can be built; builds nothing."""
    return not csrc.why_off() and (csrc.is_built() or has_cpp_compiler())


def _plan(graph: CapturedGraph, caching: Caching) -> list[CachePlan]:
    """Returns what the graphs of AOTAutograd would cache."""
    off = caching.why_off()
    if off is not None:
        return [off]
    try:
        return plan_graphs(copy_graph_module(graph.rewritten.gm), graph.inputs, caching)
    except Exception:  # the backend caches nothing for such a graph
        log.debug("could not determine cached values", exc_info=True)
        return []


def _cached_casts(
    gm: fx.GraphModule, plans: Iterable[CachePlan]
) -> set[tuple[int, torch.dtype | None]]:
    """Returns the storages of weights, with the dtypes in which their casts are cached.

    None stands for all dtypes: the code reads nothing but values of the weight. For example, a
    weight that is scaled by a folded batch norm is cast after it was scaled.
    """
    weights = gm.graph.find_nodes(op="placeholder")
    cached: set[tuple[int, torch.dtype | None]] = set()
    for plan in plans:
        cached.update(cast for spec in plan.computed for cast in spec.casts())
        read = {i for spec in plan.aliases for i in spec.positions}
        computed = {i for spec in plan.computed for i in spec.positions}
        cached.update((i, None) for i in computed - read)
    return {(storage_id(VALUE.of(weights[i])), dtype) for i, dtype in cached}


def _cached_values(plans: Iterable[CachePlan], paths: Sequence[str]) -> Iterator[CachedValueRecord]:
    for spec in [spec for plan in plans for spec in plan.computed]:
        for output in spec.outputs:
            if viewed_by(output).op != "placeholder":  # a view of a weight takes no memory
                value = VALUE.of(output)
                yield CachedValueRecord(
                    weights=tuple(paths[i] for i in spec.positions),
                    ops=spec.ops,
                    dtype=dtype_name(value.dtype),
                    shape=tuple(value.shape),
                    num_bytes=num_bytes(value),
                )


def _derive_backward(graph: CapturedGraph, caching: Caching | None) -> fx.GraphModule | None:
    """Returns the backward that AOTAutograd derives from a rewritten graph, or None."""
    from amp_fx.torch_private.aot_autograd import (
        aot_autograd,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )

    backwards: list[fx.GraphModule] = []

    def backward(gm: fx.GraphModule, _: Any) -> Any:
        backwards.append(gm)
        return make_boxed_func(gm.forward)

    compiler = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition if caching is None else caching.partition,
    )
    # Relies on this setting, which makes AOTAutograd compile the backward after the forward.
    with without_autograd_cache(force_non_lazy_backward_lowering=True):
        compiler(copy_graph_module(graph.rewritten.gm), list(graph.inputs))
    return backwards[0] if backwards else None


def first_lines(reason: str) -> str:
    """Returns the first line of a message of Dynamo, and its explanation, as one line."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    parts = [*lines[:1], *(line for line in lines[1:] if line.startswith("Explanation:"))]
    if "RNN, GRU, or LSTM" in reason:
        parts.append("Set torch._dynamo.config.allow_rnn = True to capture them.")
    return " ".join(parts)

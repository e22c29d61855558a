"""What inductor's kernels read and write, asked of its scheduler before it generates code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from amp_fx.backend.inner import compile_graph
from amp_fx.explanation.records import KernelRecord
from amp_fx.graphs.traffic import tensor_bytes
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

GENERATED, EXTERN = "generated", "extern"
CAST, LAYOUT = "cast", "layout"


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
    """What a kernel reads of frozen weights, at most all: inductor counts inputs and buffers only.

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

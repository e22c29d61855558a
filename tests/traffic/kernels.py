"""The kernels that inductor's scheduler makes, and the bytes that they read and write."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from amp_fx.graphs.sizes import hint, num_bytes

GENERATED, EXTERN = "generated", "extern"
CAST, LAYOUT = "cast", "layout"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that inductor would launch.

    Attributes:
        kind: ``"generated"`` by inductor; of those, ``"cast"`` one that does nothing but cast and
            ``"layout"`` one that only copies into another layout; ``"extern"`` a library's.
        name: The ops that it came from.
        num_bytes: What it reads and writes.
    """

    kind: str
    name: str
    num_bytes: int


def kernel_of(node: Any) -> Kernel | None:
    """Returns the kernel of a node of the scheduler; None if the node runs nothing."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode):
        return None
    num_bytes = int(node.get_read_write_buffers_sizes()) + _constant_bytes(node)
    if isinstance(node, ExternKernelSchedulerNode):
        if isinstance(node.node, MultiOutput):
            return None
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        return Kernel(EXTERN, str(name), num_bytes)
    return Kernel(_kind_of(node), _origins_of(node), num_bytes)


def _constant_bytes(node: Any) -> int:
    """Returns the bytes of constants that a kernel reads; inductor counts inputs and buffers only.

    As in inductor's count, each element of the kernel's ranges reads one element of each.
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
"""Operations in the loop of a kernel that compute nothing."""


def _kind_of(node: Any) -> str:
    """Returns the kind of a generated kernel: it computes, only casts, or only copies."""
    from torch._inductor.virtualized import V

    bodies = [getattr(part, "_body", None) for part in node.get_nodes()]
    if any(body is None or not body.op_counts.keys() <= _MOVES for body in bodies):
        return GENERATED
    touched = node.read_writes.reads | node.read_writes.writes
    return LAYOUT if len({V.graph.get_dtype(dep.name) for dep in touched}) == 1 else CAST


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the memory of a tensor's elements, with expanded dimensions counted once."""
    if tensor.layout is not torch.strided:
        return num_bytes(tensor)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = (hint(size) for size, stride in pairs if not isinstance(stride, int) or stride)
    return int(math.prod(sizes)) * tensor.dtype.itemsize

"""Repairs three bugs of inductor.

Its CPU scheduler computes wrong gradients (pytorch#185509). When the scheduler recomputes a loop
body, it drops the new name of a buffer that a scatter mutates. A kernel that reads the sum may then
run before the scatter. Casts around the backward of interpolation or max pooling trigger the bug.
The repair is that of pytorch#185873, which torch 2.13 lacks; on a torch that has it, the repair
changes nothing.

After a pass, inductor updates the values of the nodes that depend on a changed node, and compares
their storages. Sparse tensors have none, so the backward of ``nn.Embedding(sparse=True)`` raises an
error if a pass changes an op before it.

Before it generates code, inductor computes the values of all nodes again, and gives outputs the
strides of the new values. They differ if a pass changed the layout of a convolution's weight. As in
torch 2.15, strides that were recorded before (``record_output_strides``) stay.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Repairs inductor in a context.

    The repair stays active for the process, because another thread may be compiling.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, on
    ``torch._inductor.fx_utils.get_storage``, and on
    ``torch._inductor.compile_fx.record_original_output_strides``.
    """
    _repair()
    yield


@functools.cache
def _repair() -> None:
    from amp_fx.torch_private.inductor import SchedulerNode, compile_fx_module, fx_utils

    get_storage = fx_utils.get_storage
    fx_utils.get_storage = lambda t: get_storage(t) if t.layout is torch.strided else id(t)

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]

    record = compile_fx_module.record_original_output_strides

    @functools.wraps(record)
    def record_once(gm: fx.GraphModule) -> None:
        if "original_output_strides" not in gm.graph.output_node().meta:
            record(gm)

    compile_fx_module.record_original_output_strides = record_once

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
import hashlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.policies import float8 as policies_float8
from amp_fx.tables import float8 as tables_float8

if TYPE_CHECKING:
    from torch import fx


def repaired() -> contextlib.AbstractContextManager[None]:
    """Repairs inductor and adds the repair to the keys of on-disk caches, in a context.

    The repair stays active for the process, because another thread may be compiling.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, on
    ``torch._inductor.fx_utils.get_storage``, on
    ``torch._inductor.compile_fx.record_original_output_strides``, and on ``cache_key_tag`` being
    part of the keys of inductor's and AOTAutograd's caches.
    """
    _repair()
    tags = (torch.compiler.config.cache_key_tag, _tag())
    patch: contextlib.AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        cache_key_tag=tags[0] if tags[1] in tags[0] else " ".join(filter(None, tags))
    )
    return patch


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


def record_output_strides(gm: fx.GraphModule) -> None:
    """Records the strides that the outputs of a graph have in compiled code (``repaired``).

    Args:
        gm: A graph whose outputs have their values in ``meta["val"]``.
    """
    from amp_fx.torch_private.inductor import compile_fx_module

    compile_fx_module.record_original_output_strides(gm)


@functools.cache
def _tag() -> str:
    """Returns a tag for keys of caches: the repairs, and the source of ops."""
    code = ""
    with contextlib.suppress(OSError):  # where only compiled files are installed
        code = "".join(map(inspect.getsource, (policies_float8, tables_float8)))
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    return f"amp_fx: pytorch#185873, strides kept, {digest}"

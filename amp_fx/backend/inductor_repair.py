"""Repairs a fault of TorchInductor's CPU scheduler that gives wrong gradients.

When the scheduler recomputes a loop body, it forgets that a buffer which is scattered into
goes by another name afterwards; a kernel that reads the sum may then run before the scatter.
Interpolation and max pooling scatter in their backward, and casts around them are enough to
bring it about. See pytorch#185509; the repair is that of pytorch#185873, which torch 2.13
lacks and which does nothing where torch has it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import contextlib

_TAG = "amp_fx: pytorch#185873"


def repaired() -> contextlib.AbstractContextManager[None]:
    """Compile inside it; on-disk caches then keep apart what was compiled without.

    The repair stays for the process: another thread may be compiling.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, and on
    ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    _repair()
    tags = (torch.compiler.config.cache_key_tag, _TAG)
    patch: contextlib.AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        cache_key_tag=tags[0] if _TAG in tags[0] else " ".join(filter(None, tags))
    )
    return patch


@functools.cache
def _repair() -> None:
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]

"""Repairs a fault of inductor's CPU scheduler that gives wrong gradients.

When the scheduler recomputes a loop body, it forgets that a buffer which is scattered into has
another name afterwards; a kernel that reads the sum may then run before the scatter. Interpolation
and max pooling scatter in their backward, and casts around them are enough to cause it. See
pytorch#185509; the repair is that of pytorch#185873, which torch 2.13 lacks and which does nothing
where torch has it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from typing import Any

import torch

from amp_fx.policies import float8 as policies_float8
from amp_fx.tables import float8 as tables_float8


def repaired() -> contextlib.AbstractContextManager[None]:
    """Context manager to compile in: repairs inductor, and tells keys of on-disk caches so.

    The repair stays for the process: another thread may be compiling.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, and on
    ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    _repair()
    tags = (torch.compiler.config.cache_key_tag, _tag())
    patch: contextlib.AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        cache_key_tag=tags[0] if tags[1] in tags[0] else " ".join(filter(None, tags))
    )
    return patch


@functools.cache
def _repair() -> None:
    from amp_fx.torch_private.inductor import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]


@functools.cache
def _tag() -> str:
    """Returns what keys of caches lack: the repair, and code of ops that are traced through."""
    code = ""
    with contextlib.suppress(OSError):  # where only compiled files are installed
        code = "".join(map(inspect.getsource, (policies_float8, tables_float8)))
    return f"amp_fx: pytorch#185873, {hashlib.sha256(code.encode()).hexdigest()[:16]}"

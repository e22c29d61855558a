"""What amp_fx takes from torch 2.13 and older versions lack: stand-ins, for ``make gpu`` alone.

A machine with a GPU may have no way to install another torch. :func:`add_names` gives torch 2.11
and 2.12 the names; nothing is promised of amp_fx there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class CacheabilityValidator:
    """In inductor's place; older versions look at tensors when they pickle them."""

    @staticmethod
    def check_tensor(*_: Any) -> None:
        return


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """As ``torch.compiler._compile_session_context`` of torch 2.13."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


def add_names() -> None:
    """Adds the names to the modules of torch that lack them."""
    from torch._functorch import predispatch
    from torch._inductor import codecache

    for module, name, value in (
        (predispatch, "_enter_dual_level", torch._C._enter_dual_level),
        (predispatch, "_exit_dual_level", torch._C._exit_dual_level),
        (torch.compiler, "_compile_session_context", compile_session),
        (codecache, "CacheabilityValidator", CacheabilityValidator),
    ):
        if not hasattr(module, name):
            setattr(module, name, value)

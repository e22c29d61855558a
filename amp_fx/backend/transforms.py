"""Calls of compiled programs under ``torch.vmap`` and its like, which Dynamo does not compile.

Where ``torch.vmap``, ``torch.func.grad`` or ``jvp`` is called from eager code on a compiled
function (pytorch/pytorch#128711), Dynamo runs it uncompiled, and by default also all later calls,
plain ones included. Here a warning reports the call, and later calls are compiled.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from amp_fx.torch_private.dynamo import (
    InstructionTranslator,
    Unsupported,
    innermost_backend,
    skip_this_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("amp_fx.transforms")


def compile_after_transforms(backend: Callable[..., Any]) -> None:
    """Makes Dynamo compile a frame later that it first meets under a ``torch.func`` transform.

    Relies on ``InstructionTranslator._throw_if_in_functorch`` being where Dynamo refuses such a
    frame. Under ``fullgraph=True`` the exception reaches the user.
    """
    refuse = InstructionTranslator._throw_if_in_functorch

    @functools.wraps(refuse)
    def refuse_once(self: InstructionTranslator) -> None:
        try:
            refuse(self)
        except Unsupported as error:
            if _is_compiled_by(backend, self.output.compiler_fn):
                _warn_once()
                skip_this_call(error)
                error.logged = True
            raise

    InstructionTranslator._throw_if_in_functorch = refuse_once  # type: ignore[method-assign]


def _is_compiled_by(backend: Callable[..., Any], compiler_fn: Any) -> bool:
    """Returns True if a backend is what Dynamo's wrappers of it call."""
    inner: Any = innermost_backend(compiler_fn)
    return getattr(inner, "compiler_fn", inner) is backend


def _warn_once() -> None:
    if _warned:
        return
    _warned.append(True)
    log.warning(
        "a compiled program is called under torch.vmap or another torch.func transform that is not "
        "compiled itself: torch does not compile such calls; they run op by op, as written, or "
        "raise under fullgraph=True. Compile the function that calls the transform instead"
    )


_warned: list[bool] = []

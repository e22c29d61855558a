"""Handles calls of compiled functions under eager ``torch.func`` transforms.

If eager code applies ``torch.vmap``, ``torch.func.grad`` or ``jvp`` to a compiled function, Dynamo
runs that call uncompiled, and by default also every later call of the function
(pytorch/pytorch#128711). This module warns of the call and lets Dynamo compile later calls.
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
    """Makes Dynamo skip only one call under a ``torch.func`` transform, not the whole frame.

    Relies on Dynamo rejecting such a frame in ``InstructionTranslator._throw_if_in_functorch``.
    With ``fullgraph=True``, the exception reaches the user.
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
    """Returns True if ``compiler_fn`` is ``backend`` or a wrapper of Dynamo's around it."""
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

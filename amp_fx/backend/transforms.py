"""Calls of compiled programs under ``torch.vmap`` and its like, which Dynamo does not compile.

Where ``torch.vmap``, ``torch.func.grad`` or ``jvp`` is called from eager code on a compiled
function (pytorch/pytorch#128711), Dynamo runs it uncompiled, and by default also all later calls,
plain ones included. Here a warning reports the call, and later calls are compiled.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator

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
                _skip_this_call(error)
            raise

    InstructionTranslator._throw_if_in_functorch = refuse_once  # type: ignore[method-assign]


def _is_compiled_by(backend: Callable[..., Any], compiler_fn: Any) -> bool:
    """Returns True if a backend is what Dynamo's wrappers of it call."""
    inner: Any = innermost_backend(compiler_fn)
    return getattr(inner, "compiler_fn", inner) is backend


def _skip_this_call(error: Any) -> None:
    """Limits the effect of an exception of Dynamo to the call that raised it.

    Relies on ``TorchDynamoException.frame_exec_strategy``; torch 2.15 has ``apply_to_code``
    besides, which says whether later calls are skipped too.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    error.frame_exec_strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.SKIP)
    error.apply_to_code = False
    error.logged = True


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

"""Calls of compiled programs under ``torch.vmap`` and its like, which Dynamo does not compile.

Where ``torch.vmap``, ``torch.func.grad`` or ``jvp`` is called from eager code on a compiled
function (pytorch/pytorch#128711), Dynamo runs it uncompiled, and remembers to do so from then on:
plain calls later were in float32, and nobody said so. Here the call is told of, and later ones are
compiled.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

log = logging.getLogger("amp_fx.transforms")


def watch_transforms(backend: Callable[..., Any]) -> None:
    """Looks, before Dynamo compiles a frame with a backend, whether a transform is active.

    Relies on ``torch._dynamo.callback_handler`` calling ``start_callbacks`` before it traces.
    """

    def look(_: Any) -> None:
        if _is_transforming() and _compiles_with(backend):
            raise _not_now()

    kept = _Kept(look)
    kept.extend(callback_handler.start_callbacks)
    callback_handler.start_callbacks = kept


class _Kept(list[Any]):
    """Callbacks, the first of which stays: ``torch._dynamo.reset()`` clears them.

    After a reset Dynamo is to be as in a new process, where the backend is loaded once more.
    """

    def __init__(self, first: Callable[[Any], None]) -> None:
        super().__init__([first])
        self._first = first

    def clear(self) -> None:
        """Removes all others."""
        self[:] = [self._first]


def _is_transforming() -> bool:
    """Whether this thread is inside of a ``torch.func`` transform; relies on functorch's stack."""
    top = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return top is not None and top.key() in (kinds.Vmap, kinds.Grad, kinds.Jvp)


def _compiles_with(backend: Callable[..., Any]) -> bool:
    """Whether Dynamo is about to compile a frame with a backend, and may leave it uncompiled.

    Relies on ``torch._dynamo.convert_frame._compile`` having ``compiler_fn`` and ``one_graph``
    (``fullgraph=True``, where torch raises an error of its own).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_name == "_compile"
        and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
    ):
        frame = frame.f_back
    if frame is None or frame.f_locals["one_graph"]:
        return False
    found: Any = innermost_backend(frame.f_locals["compiler_fn"])
    return getattr(found, "compiler_fn", found) is backend


def _not_now() -> Unsupported:
    """Returns the exception that makes Dynamo run this call uncompiled and compile later ones.

    Relies on ``TorchDynamoException.frame_exec_strategy``; torch 2.15 also asks for
    ``apply_to_code``.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    _warn_once()
    error: Any = Unsupported("a torch.func transform around compiled code")
    error.frame_exec_strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.SKIP)
    error.apply_to_code = False
    error.logged = True
    return error  # type: ignore[no-any-return]


def _warn_once() -> None:
    if _warned:
        return
    _warned.append(True)
    log.warning(
        "a compiled program is called under torch.vmap or another torch.func transform that is not "
        "compiled itself: torch does not compile such calls, and they run op by op, as written. "
        "Compile the function that calls the transform instead"
    )


_warned: list[bool] = []

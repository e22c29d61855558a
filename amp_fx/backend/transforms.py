"""Handles calls of compiled functions under eager ``torch.func`` transforms.

If eager code applies ``torch.vmap``, ``torch.func.grad`` or ``jvp`` to a compiled function, Dynamo
runs that call uncompiled, and by default also every later call of the function
(pytorch/pytorch#128711). This module warns of the call and lets Dynamo compile later calls.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from amp_fx.torch_private.dynamo import innermost_backend
from amp_fx.torch_private.patches import skip_calls_under_transforms

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("amp_fx.transforms")


def warn_of_transforms(backend: Callable[..., Any]) -> None:
    """Makes Dynamo compile later calls of functions that ``backend`` compiles, and warns once."""

    def is_skipped(compiler_fn: Any) -> bool:
        inner: Any = innermost_backend(compiler_fn)
        is_ours = getattr(inner, "compiler_fn", inner) is backend  # Dynamo wraps backends
        if is_ours:
            _warn_once()
        return is_ours

    skip_calls_under_transforms(is_skipped)


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

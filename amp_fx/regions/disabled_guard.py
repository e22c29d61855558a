"""A guard of Dynamo on disabled autocast regions around compiled code."""

from __future__ import annotations

from functools import partial
from typing import Any

from amp_fx.regions.state import in_disabled_region
from amp_fx.torch_private.tracing import Guard, TracingContext


def guard_disabled_region() -> None:
    """Makes Dynamo compile a frame anew where a disabled region is around it, or is no more.

    Its own guards compare which devices are on, and with which dtypes: none is, in both.

    Relies on ``torch._guards.Guard`` calling any function with the builder, whose
    ``guard_manager.root`` takes Python functions as guards, and on guards that are installed as
    long as the backend is being called.
    """
    if TracingContext.try_get() is None:  # called without Dynamo
        return
    from amp_fx.torch_private.dynamo import GlobalStateSource, install_guard

    install_guard(
        Guard(GlobalStateSource(), partial(_disabled_region_match, expected=in_disabled_region()))
    )


def _disabled_region_match(builder: Any, guard: Guard, *, expected: bool) -> None:
    def is_as_expected(_: Any) -> bool:
        return in_disabled_region() is expected

    text = f"amp_fx.regions.state.in_disabled_region() is {expected}"
    builder.guard_manager.root.add_lambda_guard(is_as_expected, [text], guard.user_stack)

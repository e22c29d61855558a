"""Dynamo guard on disabled autocast regions around compiled code."""

from __future__ import annotations

from functools import partial
from typing import Any

from amp_fx.regions.state import in_disabled_region
from amp_fx.torch_private.tracing import Guard, TracingContext


def guard_disabled_region() -> None:
    """Makes Dynamo recompile a frame if it enters or leaves a disabled region.

    Dynamo's guards compare the enabled devices and their dtypes, which do not differ between a
    disabled region and no region.

    Relies on ``torch._guards.Guard``, which calls any function with the builder; on
    ``guard_manager.root`` of the builder, which accepts Python functions as guards; and on
    ``install_guard``, which accepts guards while the backend is called.
    """
    if TracingContext.try_get() is None:  # called without Dynamo
        return
    from amp_fx.torch_private.dynamo import GlobalStateSource, install_guard

    install_guard(
        Guard(GlobalStateSource(), partial(_disabled_region_match, expected=in_disabled_region()))
    )


def _disabled_region_match(builder: Any, guard: Guard, *, expected: bool) -> None:
    text = f"amp_fx.regions.state.in_disabled_region() is {expected}"
    builder.guard_manager.root.add_lambda_guard(
        lambda _: in_disabled_region() is expected, [text], guard.user_stack
    )

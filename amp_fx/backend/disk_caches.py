"""Settings of the on-disk caches of AOTAutograd and inductor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.torch_private.aot_autograd import config as functorch_config

if TYPE_CHECKING:
    import contextlib


def without_autograd_cache(**more: Any) -> contextlib.AbstractContextManager[None]:
    """Turns AOTAutograd's caches off and patches ``more`` of its settings, in a context."""
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False, **more
    )
    return patch


def region_markers_cacheable() -> contextlib.AbstractContextManager[None]:
    """Makes AOTAutograd's on-disk cache store graphs with opaque regions, in a context.

    Before torch 2.15, the cache rejects graphs with ``_enter_autocast``, because its key lacks the
    ambient state. The calls that amp_fx inserts have the device and the dtype as constant
    arguments, which are in the key.

    Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``, and on
    ``torch._functorch.config.enable_autograd_cache`` and ``enable_remote_autograd_cache``.
    """
    from amp_fx.torch_private.inductor_config import config

    marked = dict(config.unsafe_marked_cacheable_functions)
    for name in ("_enter_autocast", "_exit_autocast"):
        marked[f"torch.amp.autocast_mode.{name}"] = "amp_fx"
    patch: contextlib.AbstractContextManager[None] = config.patch(
        unsafe_marked_cacheable_functions=marked
    )
    return patch

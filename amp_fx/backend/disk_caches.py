"""Tells the on-disk caches of AOTAutograd and inductor what their keys lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.policy_mode import enter_policy
from amp_fx.torch_private.aot_autograd import config as functorch_config

if TYPE_CHECKING:
    import contextlib

    from torch import fx


def without_autograd_cache(**more: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager in which AOTAutograd reads no caches; patches more of its settings."""
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False, **more
    )
    return patch


def region_markers_cacheable(gm: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Context manager in which AOTAutograd's on-disk cache stores graphs with opaque regions.

    Before torch 2.15 it passes over ``_enter_autocast`` because the ambient state is not in its
    key; ours spell out device and dtype as constant arguments, which are. Those that carry a
    policy mean another one in another process, and keep the graph out of the cache, which would
    take it since 2.15.

    Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``, and on
    ``torch._functorch.config.enable_autograd_cache`` and ``enable_remote_autograd_cache``.
    """
    from amp_fx.torch_private.inductor_config import config

    graphs = [child.graph for child in gm.modules() if isinstance(child, torch.fx.GraphModule)]
    if any(g.find_nodes(op="call_function", target=enter_policy) for g in graphs):
        return without_autograd_cache()
    marked = dict(config.unsafe_marked_cacheable_functions)
    for name in ("_enter_autocast", "_exit_autocast"):
        marked[f"torch.amp.autocast_mode.{name}"] = "amp_fx"
    patch: contextlib.AbstractContextManager[None] = config.patch(
        unsafe_marked_cacheable_functions=marked
    )
    return patch

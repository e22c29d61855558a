"""Makes eager ``torch.utils.checkpoint`` recompute in the regions of the forward.

``torch.utils.checkpoint`` restores the autocast state of two devices, its own and the CPU, but no
policy. It also enters a disabled region if autocast was off in the forward, although a disabled
region requests full precision and no region does not (``state.in_disabled_region``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from amp_fx.graphs.policy_mode import ambient_policy, policy_applied
from amp_fx.regions.state import nested_as, nesting

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def restore_regions() -> None:
    """Makes all later checkpoints of the process record the policy and the number of regions.

    Relies on ``checkpoint.CheckpointFunction.forward`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` (``..._impl`` since torch 2.14 or
    2.15), which receive the function as argument 1 and 0, and on ``checkpoint.checkpoint``, which
    looks both up when it is called.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):
        name = f"{name}_impl"
    reentrant = checkpoint.CheckpointFunction.forward
    non_reentrant = getattr(checkpoint, name)

    @functools.wraps(reentrant)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _in_current_regions(function), *args)  # type: ignore[no-untyped-call]

    @functools.wraps(non_reentrant)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return non_reentrant(_in_current_regions(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, generator)


def _in_current_regions(function: Callable[..., Any]) -> Callable[..., Any]:
    policy, depth = ambient_policy(), nesting()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with policy_applied(policy), nested_as(depth):
            return function(*args, **kwargs)

    return call

"""Makes eager ``torch.utils.checkpoint`` recompute in the regions of the forward.

It restores the autocast state of two devices, its own and the CPU's, and no policy. It restores a
state that is off by a disabled region, which says full precision where there was no region at all
(``state.in_disabled_region``).
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
    """Changes what checkpoints record from here on, for the whole process.

    Relies on ``checkpoint.CheckpointFunction.forward`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` (``..._impl`` since torch 2.14 or
    2.15) getting the function as argument 1 and 0, and on ``checkpoint.checkpoint`` looking
    both up when it is called.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):
        name = f"{name}_impl"
    reentrant = checkpoint.CheckpointFunction.forward
    other = getattr(checkpoint, name)

    @functools.wraps(reentrant)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _with_regions_of_now(function), *args)  # type: ignore[no-untyped-call]

    @functools.wraps(other)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return other(_with_regions_of_now(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, generator)


def _with_regions_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    policy, depth = ambient_policy(), nesting()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with policy_applied(policy), nested_as(depth):
            return function(*args, **kwargs)

    return call

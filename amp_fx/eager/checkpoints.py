"""Makes eager ``torch.utils.checkpoint`` recompute in the regions of the forward.

``torch.utils.checkpoint`` restores the autocast state of two devices, its own and the CPU, but no
policy. It also enters a disabled region if autocast was off in the forward, although a disabled
region requests full precision and no region does not (``state.in_disabled_region``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from amp_fx.graphs.policy_mode import ambient_policy, use_policy
from amp_fx.regions.state import nested_as, nesting
from amp_fx.torch_private.patches import wrap_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def restore_regions() -> None:
    """Makes all later checkpoints of the process record the policy and the number of regions."""
    wrap_checkpoints(_in_current_regions)


def _in_current_regions(function: Callable[..., Any]) -> Callable[..., Any]:
    policy, depth = ambient_policy(), nesting()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with use_policy(policy), nested_as(depth):
            return function(*args, **kwargs)

    return call

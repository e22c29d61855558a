"""Records that passes store in ``node.meta``. ``metadata.py`` has their keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.policies.float32_products import FLOAT32_PRODUCT
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    import torch

    from amp_fx.regions.state import AutocastState


@dataclasses.dataclass(frozen=True)
class AutocastSite:
    """Autocast state and grad mode at a node.

    Attributes:
        state: The autocast dtype of each device.
        is_grad_enabled: Whether gradients are recorded.
        is_bare: Whether the program is in no region here. The state then comes from the options of
            amp_fx, and Dynamo captured the node without autocast.
        is_branch: Whether the node is in a branch of ``cond``. Such a branch traces its backward
            with the autocast cache off, so each use of a weight has a separate cast.
        casts_transforms: Whether autocast applies inside torch.func transforms and levels of
            forward-mode AD outside of the program's regions.
    """

    state: AutocastState
    is_grad_enabled: bool
    is_bare: bool = False
    # See Note [Sharing casts] in ``casts.py``.
    is_branch: bool = False
    casts_transforms: bool = True

    def without_cast_cache(self) -> AutocastSite:
        """Returns this site with eager autocast's weight cache disabled."""
        return dataclasses.replace(self, state=dataclasses.replace(self.state, cache_enabled=False))

    def without_autocast(self) -> AutocastSite:
        """Returns this site with autocast disabled."""
        return dataclasses.replace(self, state=self.state.turned_off())


@dataclasses.dataclass(frozen=True)
class OpDecision:
    """Decision on one op with a policy in the decomposition of a node."""

    op: str
    device_type: str
    policy: CastPolicy
    origin: str = "table"

    @property
    def node_op(self) -> str:
        """Qualified name of the op that the graph contains."""
        return FLOAT32_PRODUCT if self.policy is CastPolicy.LOWER_PRECISION_WIDE else self.op


@dataclasses.dataclass(frozen=True)
class Cast:
    """Description of a cast that a pass inserted (``metadata.CAST``).

    Attributes:
        source_dtype: Dtype of the source.
        dtype: Dtype of the result.
        source_version: Version of the source at the cast (``values.version_of``). Two casts of one
            node are equal only if no write happened between them.
        reason: The op that needs the cast, ``"output"``, or a constant of ``casts``.
    """

    source_dtype: torch.dtype
    dtype: torch.dtype
    source_version: tuple[int, int] | None
    reason: str


@dataclasses.dataclass(frozen=True)
class RemovedCast:
    """An inserted cast that a pass removed (``metadata.REMOVED_CASTS``).

    Attributes:
        name: Name of its node.
        source: Name of the node whose result it cast.
        cast: Its description.
        readers: Names of the nodes that read it.
        num_elements: Number of elements of the source and of the result.
        why: The reason of the removal.
    """

    name: str
    source: str
    cast: Cast
    readers: tuple[str, ...]
    num_elements: int
    why: str

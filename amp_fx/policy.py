"""Which op gets which cast policy on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from amp_fx.cast_policy import CastPolicy


class Policy:
    """A named set of op tables, one per device type."""

    def rule(self, op: torch._ops.OpOverload, device_type: str) -> CastPolicy | None:
        """The policy of one op overload on one device type; None if it has none."""
        raise NotImplementedError

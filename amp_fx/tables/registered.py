"""The table of ops that libraries registered in this process (``amp_fx.register_op``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fx.tables.cast_policy import CastPolicy


@dataclasses.dataclass(frozen=True)
class RegisteredOp:
    """Holds what ``register_op`` got for one overload.

    Attributes:
        policy: How its inputs are cast.
        args: Arguments that are treated otherwise, as ``Policy.with_args`` takes them.
    """

    policy: CastPolicy
    args: tuple[tuple[str, str], ...]


REGISTERED: dict[str, RegisteredOp] = {}
"""By qualified overload name; on all devices, and under every policy."""

"""Table of the ops that were registered with ``amp_fx.register_op``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fx.tables.cast_policy import CastPolicy


@dataclasses.dataclass(frozen=True)
class RegisteredOp:
    """Registration of one overload.

    Attributes:
        policy: The cast policy.
        args: Treatments of single arguments, as in ``Policy.with_args``.
    """

    policy: CastPolicy
    args: tuple[tuple[str, str], ...]


REGISTERED: dict[str, RegisteredOp] = {}
"""Registrations by qualified overload name. They apply on all devices and under every policy."""

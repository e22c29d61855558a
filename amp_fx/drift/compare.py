"""Finds where a policy and the installed torch's autocast disagree, op by op."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from amp_fx.drift.measure import AUTOGRAD_KEYS, measure
from amp_fx.errors import PolicyError
from amp_fx.regions.kernels import added_kernels
from amp_fx.tables import OWN_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.policies.policy import Policy
    from amp_fx.tables.cast_policy import CastPolicy

AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
}
"""The dispatch key of each device type's autocast."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One op that a policy and the installed torch treat differently.

    Attributes:
        device_type: On which device type.
        op: Qualified overload name.
        ours: The policy's rule; None if it has none.
        torch: The installed torch's; None if it has none.
        note: More, where the two rules do not say it all.
    """

    device_type: str
    op: str
    ours: CastPolicy | None
    torch: CastPolicy | None
    note: str = ""

    def __str__(self) -> str:
        """One line that names the op and says what differs."""
        here = f"{self.device_type}: {self.op}"
        if self.note:
            return f"{here}: {self.note}"
        if self.ours is None or self.torch is None:
            rule = self.ours or self.torch
            where = "missing here" if self.ours is None else "missing in torch"
            return f"{here}: {where} ({rule.value if rule else 'no policy'})"
        return f"{here}: other policy ({self.ours.value} here, {self.torch.value} in torch)"


def find_drift(policy: Policy, device_types: Iterable[str] | None = None) -> tuple[Difference, ...]:
    """Compares a policy with what the installed torch registers and does.

    Names are compared on every device type, policies on those where they can be measured
    (``amp_fx.drift.measure``; no device is needed). Ops outside of the ``aten`` namespace, those
    that ``OWN_KERNELS`` lists, and device types whose autocast PyTorch does not register
    itself are left out. Run no model in another thread meanwhile.

    Returns:
        The differences by device type, then by name; empty if there are none.
    """
    chosen = policy.tables if device_types is None else device_types
    return tuple(
        difference
        for device_type in chosen
        if device_type in AUTOCAST_KEYS
        for difference in _drift_on(policy, device_type)
    )


def registered_ops(device_type: str) -> frozenset[str]:
    """The ops for which the installed torch registers an autocast kernel, not amp_fx.

    Relies on the registrations of a dispatch key being listed by qualified overload name, for
    devices that the build does not support as well.
    """
    key = AUTOCAST_KEYS[device_type]
    ours = {op for device, op in added_kernels if device == device_type}
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key)) - ours


def _drift_on(policy: Policy, device_type: str) -> list[Difference]:
    table = policy.tables.get(device_type, {})
    own_kernels = OWN_KERNELS.get(device_type, ())
    theirs = {op for op in registered_ops(device_type) if op.startswith("aten::")}
    theirs.difference_update(own_kernels)
    differences = (
        _difference(op, device_type, table.get(op), is_registered=op in theirs)
        for op in sorted(theirs | set(table))
    )
    return [difference for difference in differences if difference is not None]


def _difference(
    op: str, device_type: str, ours: CastPolicy | None, *, is_registered: bool
) -> Difference | None:
    if not is_registered:
        return Difference(device_type, op, ours, None)
    if device_type not in AUTOGRAD_KEYS:
        note = "missing here (what torch does cannot be measured on this device type)"
        return Difference(device_type, op, None, None, note) if ours is None else None
    try:
        theirs = measure(op, device_type)
    except PolicyError as error:
        return Difference(device_type, op, ours, None, note=str(error))
    return None if ours is theirs else Difference(device_type, op, ours, theirs)

"""Unscaling, checking and clipping of grouped gradients; nothing here waits for the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_fx.grad_scaler import host_scale
from amp_fx.grad_scaler.torch_private import check_and_unscale_, has_check_and_unscale

if TYPE_CHECKING:
    from amp_fx.grad_scaler.gradients import GradGroup

# These norms scale with their input, and their powers stay well inside float64.
_HOMOGENEOUS_NORMS = (1.0, 2.0, math.inf)


class OnDevices(dict[torch.device, Tensor]):
    """Copies of one 0-dim tensor, made as devices ask for them."""

    def __missing__(self, device: torch.device) -> Tensor:
        """Copy the tensor to a device that asks for the first time."""
        source = next(iter(self.values()))
        # A copy to the host that nobody waits for could be read before it has arrived.
        copy = source.to(device, non_blocking=device.type != "cpu")
        self[device] = copy
        return copy


def on_devices(source: Tensor) -> OnDevices:
    """Serve copies of this tensor."""
    return OnDevices({source.device: source})


@torch.no_grad()
def check(groups: list[GradGroup], inv_scale: Tensor | None = None) -> dict[torch.device, Tensor]:
    """Look for gradients that are not finite, and change none.

    Args:
        groups: the gradients.
        inv_scale: float32, 0-dim. If given, look also for those that multiplying by it overflows.

    Returns:
        Per device a float32 0-dim tensor: 1 if something is not finite, else 0.
    """
    found_inf = _no_inf(groups)
    for group in groups:
        _check_(group, found_inf[group.device])
    if inv_scale is not None:
        factors = on_devices(inv_scale)
        for group in groups:
            _check_product_(group, factors[group.device], found_inf[group.device])
    return found_inf


@torch.no_grad()
def unscale_(
    groups: list[GradGroup], inv_scale: Tensor, *, may_overflow: bool = False
) -> dict[torch.device, Tensor]:
    """Multiply all gradients by `inv_scale` and look for those that are not finite.

    Args:
        groups: the gradients.
        inv_scale: float32, 0-dim, on any device.
        may_overflow: whether `inv_scale` may be above 1, so that finite gradients can overflow. The
            kernel looks at gradients before it multiplies them, so they are then checked again.

    Returns:
        Per device a float32 0-dim tensor: 1 if something is not finite, else 0.
    """
    found_inf = _no_inf(groups)
    factor = on_devices(inv_scale)
    for group in groups:
        flag = found_inf[group.device]
        if has_check_and_unscale(group.device, group.dtype):
            check_and_unscale_(group.grads, flag, factor[group.device])
        else:
            _check_(group, flag)
            torch._foreach_mul_(group.grads, factor[group.device])
        if may_overflow:
            _check_(group, flag)
    return found_inf


def combine(found_infs: list[Tensor], device: torch.device) -> Tensor:
    """One flag out of several, on a device: not 0 if any is not 0."""
    if len(found_infs) == 1 and found_infs[0].device == device:
        return found_infs[0]
    flags = [flag if flag.device == device else on_devices(flag)[device] for flag in found_infs]
    if not flags:
        return _float32(0.0, device)
    return flags[0] if len(flags) == 1 else torch.stack(flags).sum()


@torch.no_grad()
def unscale_and_clip_(
    groups: list[GradGroup], inv_scale: Tensor, max_norm: float, norm_type: float
) -> tuple[dict[torch.device, Tensor], Tensor] | None:
    """Check, unscale and clip in one pass, after one for the norm of the scaled gradients.

    On CUDA that norm is taken in float64, which no scaled float32 gradient overflows. On the CPU,
    where float64 is slow, it may overflow, but there looking whether it did is free.

    Args:
        groups: the gradients.
        inv_scale: float32, 0-dim, at most 1.
        max_norm: the largest norm that gradients keep.
        norm_type: the order of the norm.

    Returns:
        What `unscale_` returns, and the norm of the unscaled gradients. None, with nothing done, if
        the norm of the scaled gradients does not tell, or gradients are float64.
    """
    device_types = {group.device.type for group in groups}
    if norm_type not in _HOMOGENEOUS_NORMS or device_types not in ({"cpu"}, {"cuda"}):
        return None
    if _norm_dtype(groups) is torch.float64:  # the kernel's factor is float32
        return None
    scaled_norm = _total_norm(groups, norm_type)
    known = host_scale.peek(scaled_norm)
    if known is not None and not math.isfinite(known):
        return None
    inv_scale = on_devices(inv_scale)[scaled_norm.device]
    norm = scaled_norm * inv_scale
    factor = clip_factor(norm, max_norm)
    if known is None:  # keeps infinities and NaNs where they are, for reports to count
        factor = torch.where(norm.isfinite(), factor, 1.0)
    found_inf = unscale_(groups, factor.to(torch.float32) * inv_scale)
    return found_inf, norm.to(_norm_dtype(groups))


@torch.no_grad()
def norm(groups: list[GradGroup], norm_type: float) -> Tensor:
    """The norm of gradients, in their own dtype, float32 at least."""
    return _total_norm(groups, norm_type).to(_norm_dtype(groups))


@torch.no_grad()
def clip_(groups: list[GradGroup], max_norm: float, norm: Tensor) -> Tensor:
    """Clip unscaled gradients by their norm, and return it."""
    factors = on_devices(clip_factor(norm, max_norm))
    for group in groups:
        torch._foreach_mul_(group.grads, factors[group.device])
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of this norm by; torch.nn.utils.clip_grad_norm_'s formula."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _total_norm(groups: list[GradGroup], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, on the device of the first; 0 if there are none."""
    norms = [norm for group in groups for norm in _norms(group, norm_type)]
    if not norms:
        return _float32(0.0, groups[0].device if groups else None)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    norm: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return norm


def _norm_dtype(groups: list[GradGroup]) -> torch.dtype:
    """The dtype in which a norm is handed out: the gradients' own, float32 at least."""
    dtype = torch.float32
    for group in groups:
        dtype = torch.promote_types(dtype, group.dtype)
    return dtype.to_real()


def _float32(value: float, device: torch.device | None) -> Tensor:
    """A 0-dim tensor; scale and flags are float32 whatever the default dtype."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _no_inf(groups: list[GradGroup]) -> dict[torch.device, Tensor]:
    found_inf: dict[torch.device, Tensor] = {}
    for group in groups:
        if group.device not in found_inf:
            found_inf[group.device] = _float32(0.0, group.device)
    return found_inf


def _check_(group: GradGroup, found_inf: Tensor) -> None:
    if has_check_and_unscale(group.device, group.dtype):
        check_and_unscale_(group.grads, found_inf, _float32(1.0, group.device))
        return
    _check_product_(group, _float32(1.0, group.device), found_inf)


def _check_product_(group: GradGroup, factor: Tensor, found_inf: Tensor) -> None:
    """Set `found_inf` if the largest gradient times `factor` is not finite in its dtype."""
    largest = _norms(group, math.inf)
    if largest:
        product = (torch.stack(largest) * factor).to(group.dtype.to_real())
        found_inf.logical_or_(product.isfinite().all().logical_not())


def _norms(group: GradGroup, norm_type: float) -> list[Tensor]:
    grads = [grad for grad in group.grads if grad.numel()]
    if not grads:
        return []
    return list(torch._foreach_norm(grads, norm_type, dtype=_accumulation_dtype(group)))


def _accumulation_dtype(group: GradGroup) -> torch.dtype | None:
    if group.dtype.is_complex:
        return None
    if group.device.type == "cuda":
        return torch.float64
    return torch.promote_types(group.dtype, torch.float32)

"""Groups, unscales, checks and clips an optimizer's gradients without synchronization."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from amp_fx.dtypes import is_low
from amp_fx.torch_private.kernels import foreach_mul_, foreach_norm
from amp_fx.torch_private.optimizers import unscale_and_check_
from amp_fx.torch_private.tensors import group_by_device_and_dtype
from amp_fx.weights.spread import part_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_IS_SPARSE = operator.attrgetter("is_sparse")


def upcast(value: Tensor) -> Tensor:
    """Returns float16 and bfloat16 values in float32, and others unchanged."""
    return value.float() if is_low(value.dtype) else value


def moved(value: Tensor, device: torch.device) -> Tensor:
    """Moves a 0-dim tensor to a device; only waits if that is the host."""
    return value.to(device, non_blocking=device.type != "cpu")


def params_of(optimizer: Any) -> list[Tensor]:
    """Lists all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Lists the gradients of all parameters with a gradient."""
    return [grad for param in params if (grad := param.grad) is not None]


def has_nonzero_grads(params: Iterable[Tensor]) -> bool:
    """Returns False if no parameter has a gradient, or all gradients are zero."""
    return any(bool(part_of(dense(grad)).any()) for grad in grads_of(params))


def dense(grad: Tensor) -> Tensor:
    """Returns the values of a sparse gradient, without a copy; other gradients unchanged."""
    return grad._values() if grad.is_sparse else grad


def grouped_grads(params: list[Tensor], *, coalesce: bool = False) -> list[list[Tensor]]:
    """Groups gradients by device and dtype, and DTensors also by mesh and placements.

    Sparse gradients are represented by their values. Those in float16 are coalesced first, because
    sums of duplicates can overflow. Plain tensors precede DTensors, so that the flag that is
    reduced over a mesh includes their overflows.
    """
    grads = grads_of(params)
    if any(map(_IS_SPARSE, grads)):
        for param in params:
            grad = param.grad
            if grad is not None and grad.is_sparse and (coalesce or grad.dtype is torch.float16):
                param.grad = grad.coalesce()
        grads = [dense(grad) for grad in grads_of(params)]
    if {*map(type, grads)} <= {Tensor, torch.nn.Parameter}:
        return group_by_device_and_dtype(grads)
    groups: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for grad in sorted(grads, key=lambda grad: hasattr(grad, "placements")):
        layout = getattr(grad, "device_mesh", None), getattr(grad, "placements", None)
        groups[(grad.device, grad.dtype, *layout)].append(grad)
    return [*groups.values()]


@torch.no_grad()
def unscale_(
    groups: list[list[Tensor]], inv_scale: Tensor, found_inf: Tensor, full_inv_scale: Tensor | None
) -> dict[torch.device, Tensor]:
    """Multiplies gradients by ``inv_scale``; returns a flag per device that is 1 on overflow.

    torch's kernel checks gradients before it multiplies them. If the inverse scale may be above 1,
    it is also passed as ``full_inv_scale``, to detect gradients whose product overflows.
    """
    flags = {found_inf.device: found_inf}
    for group in groups:
        device = group[0].device
        flag = flags.setdefault(device, moved(found_inf, device))
        values = [torch.view_as_real(g) for g in group] if group[0].is_complex() else group
        if full_inv_scale is not None:
            _check_product_(values, moved(full_inv_scale, device), flag)
        unscale_and_check_(values, flag, moved(inv_scale, device))
    return flags


def _check_product_(grads: list[Tensor], factor: Tensor, flag: Tensor) -> None:
    """Sets a flag if the largest gradient times a factor is not finite in its dtype."""
    parts = [part for part in map(part_of, grads) if part.numel()]
    if parts:
        largest = torch.stack(foreach_norm(parts, math.inf)) * factor
        flag.logical_or_(largest.to(parts[0].dtype).isfinite().all().logical_not())


@torch.no_grad()
def clip_(params: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clips unscaled gradients; returns their norm before clipping, 0-dim and at least float32.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it supports sparse gradients, and DTensors together
    with plain tensors. On accelerators, gradients are not clipped if one is not finite, so that
    infinities and NaNs can still be counted.
    """
    groups = grouped_grads(params, coalesce=True)
    norms = [_group_norm(group, norm_type) for group in groups]
    norm = norms[0] if norms else torch.tensor(0.0)
    if len(norms) > 1:
        stacked = torch.stack([group_norm.to(norm.device) for group_norm in norms])
        norm = cast("Tensor", torch.linalg.vector_norm(stacked, norm_type))
    finite = norm if norm.is_cpu else norm.where(norm.isfinite(), 0.0)
    factor = torch.clamp(max_norm / (finite + 1e-6), max=1.0)  # as in ``clip_grad_norm_``
    for group in groups:
        foreach_mul_([part_of(grad) for grad in group], moved(factor, group[0].device))
    return norm


def _group_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    norm: Any = torch.nn.utils.get_total_norm(
        [upcast(grad) for grad in grads if grad.numel()], norm_type
    )
    return cast("Tensor", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

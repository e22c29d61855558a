"""Optimizer steps in two compiled passes over memory.

The first pass reads the gradients, computes their norm and checks that they are finite. The second
pass unscales, clips and updates in registers, and writes the weights, the optimizer state and the
cached low-precision copies of the weights. With AdamW, the passes move 4 and 30 bytes per element,
including 2 bytes for the copy.
"""

from __future__ import annotations

import itertools
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_fx.grad_scaler.gradients import clip_factor, grads_of, params_of, upcast
from amp_fx.torch_private.kernels import foreach_add_
from amp_fx.torch_private.optimizers import runs_only_own_code
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.write_signals import after_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.weights.step_copies import Computed

    States = Sequence[Tensor]

    Flags = tuple[str, ...]

    New = tuple[Tensor, list[Tensor]]


class OptimizerRule(NamedTuple):
    """Update of one weight by one kind of optimizer, as pure functions.

    Formulas and the order of ops match torch's loops over parameters (``_single_tensor_adam``,
    ``_single_tensor_sgd``), which all implementations of torch follow within roundings. As in these
    loops, numbers that are equal for all elements of a weight (bias corrections, step sizes) are
    computed in float64. ``torch.compile`` of torch's code computes them in float32, where
    ``1 - 0.999**step`` loses up to 5 of its 7 digits.

    Attributes:
        numbers: Names of the numeric settings of a group, the learning rate first. They may change
            at any time.
        flags: Names of the settings that determine the ops of an update; a flag is set if the
            setting is truthy.
        states: Names of the state tensors of a weight, with the flag that each requires; ``""`` if
            it always exists.
        counts: True if the state contains a step counter.
        scalars: Computes the scalars of updates, shape [scalars, weights], from the counters after
            the step, float64 of shape [weights], and the numbers, float64 of shape [numbers,
            weights].
        update: Computes the new weight and states from the weight, its gradient, states, scalars
            and flags.
    """

    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    states: dict[str, str]
    counts: bool
    scalars: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[Tensor, Tensor, States, Tensor, Flags], New]


def rule_of(optimizer: Any) -> OptimizerRule | None:
    """Returns the rule of an optimizer; None if it cannot be used.

    Returns None for other classes, for optimizers with hooks, a replaced ``step`` or
    ``differentiable=True``, and if settings other than the learning rate are tensors.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or not runs_only_own_code(optimizer, allowed=(after_step,)):
        return None
    return rule if all(_is_plain(group, rule) for group in optimizer.param_groups) else None


def number(group: dict[str, Any], name: str) -> Any:
    """Returns a setting of a group: a number or a tensor of one element."""
    if name.startswith("beta"):
        return group["betas"][int(name[-1]) - 1]
    return group[name]


def _is_plain(group: dict[str, Any], rule: OptimizerRule) -> bool:
    if group.get("differentiable"):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.requires_grad):
        return False
    others = [number(group, name) for name in rule.numbers if name != "lr"]
    return all(isinstance(other, Real) for other in others)


def _adam_scalars(counts: Tensor, numbers: Tensor) -> Tensor:
    lr, beta1, beta2, eps, weight_decay = numbers.unbind()
    step_size = lr / (1 - beta1**counts)
    correction = (1 - beta2**counts).sqrt()
    decay_factor = 1 - lr * weight_decay
    return torch.stack(
        [1 - beta1, beta2, 1 - beta2, correction, eps, -step_size, decay_factor, weight_decay]
    )


def _adam(weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: Flags) -> New:
    weight1, beta2, weight2, correction, eps, step_size, decay_factor, weight_decay = (
        scalars.unbind()
    )
    if "maximize" in flags:
        grad = -grad
    if "weight_decay" in flags and "decoupled_weight_decay" in flags:
        weight = weight * decay_factor
    elif "weight_decay" in flags:
        grad = grad + weight_decay * weight
    first = torch.lerp(states[0], grad, weight1)
    second = states[1] * beta2 + weight2 * grad * grad
    largest = torch.maximum(states[2], second) if "amsgrad" in flags else second
    denominator = largest.sqrt() / correction + eps
    weight = weight + step_size * first / denominator
    return weight, [first, second, *([largest] if "amsgrad" in flags else [])]


def _sgd_scalars(counts: Tensor, numbers: Tensor) -> Tensor:  # noqa: ARG001
    lr, momentum, dampening, weight_decay = numbers.unbind()
    return torch.stack([-lr, momentum, 1 - dampening, weight_decay])


def _sgd(weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: Flags) -> New:
    step_size, momentum, grad_weight, weight_decay = scalars.unbind()
    if "maximize" in flags:
        grad = -grad
    if "weight_decay" in flags:
        grad = grad + weight_decay * weight
    if "momentum" not in flags:
        return weight + step_size * grad, []
    buffer = states[0] * momentum + grad_weight * grad
    grad = grad + momentum * buffer if "nesterov" in flags else buffer
    return weight + step_size * grad, [buffer]


_ADAM = OptimizerRule(
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("amsgrad", "maximize", "decoupled_weight_decay", "weight_decay"),
    states={"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    counts=True,
    scalars=_adam_scalars,
    update=_adam,
)
_SGD = OptimizerRule(
    numbers=("lr", "momentum", "dampening", "weight_decay"),
    flags=("maximize", "weight_decay", "momentum", "nesterov"),
    states={"momentum_buffer": "momentum"},
    counts=False,
    scalars=_sgd_scalars,
    update=_sgd,
)
_RULES: dict[type, OptimizerRule] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _SGD,
}


_DEVICES = ("cpu", "cuda")  # other devices may lack float64, which `OptimizerRule.scalars` needs
_DTYPES = (torch.float32, torch.float64)


class Work(NamedTuple):
    """Tensors of one step; lists are in the order of the weights."""

    rule: OptimizerRule
    weights: list[Tensor]  # weights with gradients
    grads: list[Tensor]
    states: list[list[Tensor]]
    counts: list[Tensor]  # step counters; empty if the rule has none
    sizes: tuple[int, ...]  # number of weights with gradients in each group
    flags: tuple[Flags, ...]


def work_of(optimizer: Any) -> Work | None:
    """Returns the tensors of a step; None if the optimizer's steps cannot use two passes.

    States and counters are None before the first step. Weights that share memory are updated one
    after the other in eager steps, which a graph that writes them through aliases cannot see.
    """
    rule = rule_of(optimizer)
    if rule is None:
        return None
    sizes = tuple([len(grads_of(group["params"])) for group in optimizer.param_groups])
    group_flags = [
        tuple([name for name in rule.flags if group.get(name)]) for group in optimizer.param_groups
    ]
    flags = tuple([f for f, size in zip(group_flags, sizes, strict=True) for _ in range(size)])
    weights = [param for param in params_of(optimizer) if param.grad is not None]
    grads = grads_of(weights)
    all_states = [optimizer.state.get(weight, {}) for weight in weights]
    states = [
        [state.get(name) for name, flag in rule.states.items() if not flag or flag in weight_flags]
        for state, weight_flags in zip(all_states, flags, strict=True)
    ]
    counts = [state.get("step") for state in all_states] if rule.counts else []
    tensors = [tensor for tensor in (*weights, *grads, *flat(states)) if tensor is not None]
    if not _are_supported(tensors) or _share_memory(weights):
        return None
    return Work(rule, weights, grads, states, counts, sizes, flags)


def _share_memory(weights: Sequence[Tensor]) -> bool:
    """Returns True if the address ranges of two weights on one device overlap."""
    ranges = sorted([(data_address(w), _num_bytes_spanned(w)) for w in weights if w.numel()])
    return any(start + size > after for (start, size), (after, _) in itertools.pairwise(ranges))


def _num_bytes_spanned(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (1 + sum(steps)) * tensor.itemsize


def _are_supported(tensors: list[Tensor]) -> bool:
    """Returns True if tensors are plain and dense, on one device and of one supported dtype.

    AOTAutograd loses writes to float64 tensors without dimensions.
    """
    first = next((tensor for tensor in tensors if tensor.numel()), None)
    return (
        first is not None
        and first.dtype in _DTYPES
        and first.device.type in _DEVICES
        and all(
            tensor.layout is torch.strided
            and tensor.dtype is first.dtype
            and tensor.device == first.device
            and type(tensor) in (Tensor, torch.nn.Parameter)  # no DTensor
            and not (tensor.dtype is torch.float64 and tensor.dim() == 0)
            for tensor in tensors
        )
    )


def measure_of(work: Work, max_norm: float | None, norm_type: float) -> Any:
    """Returns the first pass: computes overflow flag, norm, clip factor and scalars of updates."""
    rule, sizes = work.rule, work.sizes
    dtype = work.weights[0].dtype

    def measure(
        grads: list[Tensor], inv_scale: Tensor | None, counts: Tensor, numbers: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        columns = [numbers[:, i : i + 1].expand(-1, size) for i, size in enumerate(sizes)]
        scalars = rule.scalars(counts + 1, torch.cat(columns, 1)).to(dtype)
        found_inf = norm = factor = None
        grads = [grad for grad in grads if grad.numel()]
        if inv_scale is not None:
            grads = [grad * inv_scale for grad in grads]
            found_inf = overflow_flag(grads)
        if max_norm is not None:
            norm = total_norm(grads, norm_type)
            factor = clip_factor(norm, max_norm, found_inf)
        return found_inf, norm, factor, scalars

    return measure


def update_of(work: Work, *, write_grads: bool) -> Any:
    """Returns the second pass: updates weights, states and cached copies of weights."""
    rule, flags = work.rule, work.flags

    def update(
        weights: list[Tensor],
        lows: list[list[Tensor]],
        states: list[list[Tensor]],
        grads: list[Tensor],
        scalars: Tensor,
        inv_scale: Tensor | None,
        factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        for i, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            unscaled = grad if inv_scale is None else grad * inv_scale
            unscaled = unscaled if factor is None else unscaled * factor
            new, new_states = rule.update(weight, unscaled, states[i], scalars[:, i], flags[i])
            new = _unless(found_inf, weight, new)
            for state, value in zip(states[i], new_states, strict=True):
                state.copy_(_unless(found_inf, state, value))
            for low in lows[i]:
                low.copy_(new)
            weight.copy_(new)
            if write_grads:
                grad.copy_(unscaled)

    return update


def split(
    weights: list[Tensor], lows: list[list[Tensor]]
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Returns the copies that an update writes, and pairs of weights and copies to write later.

    On the CPU, copies whose strides differ from the weight's (such as those of convolutions) are
    written later. Otherwise, inductor would transpose tiles in the update, which takes 3 times as
    long.
    """
    if weights[0].device.type != "cpu":
        return lows, []
    fused: list[list[Tensor]] = []
    separate: list[tuple[Tensor, Tensor]] = []
    for weight, copies in zip(weights, lows, strict=True):
        fused.append([low for low in copies if low.stride() == weight.stride()])
        separate += [(weight, low) for low in copies if low.stride() != weight.stride()]
    return fused, separate


def write_copies(separate: list[tuple[Tensor, Tensor]], computed: list[Computed]) -> None:
    """Writes the copies that are not part of an update."""
    for weight, low in separate:
        low.copy_(weight)
    for weight, function, targets in computed:
        for target, source in zip(targets, function(weight), strict=True):
            target.copy_(source)


def flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenates lists of tensors."""
    return [tensor for tensors in lists for tensor in tensors]


def _unless(found_inf: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if found_inf is None else torch.where(found_inf != 0, old, new)


def overflow_flag(grads: list[Tensor]) -> Tensor:
    """Returns a 0-dim float32 tensor: 1.0 if a gradient is not finite, else 0.0."""
    are_finite = torch.stack([grad.isfinite().all() for grad in grads])
    return are_finite.all().logical_not().to(torch.float32)


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of all gradients as one vector, with ops that inductor fuses."""
    norms = [torch.linalg.vector_norm(upcast(g), norm_type) for g in grads if g.numel()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def numbers_of(optimizer: Any, work: Work) -> Tensor:
    """Returns the settings of all groups: float64, [numbers, groups], on the weights' device."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    rows = [[0.0 if isinstance(rate, Tensor) else float(rate) for rate in rates]]
    rows += [[float(number(group, name)) for group in groups] for name in work.rule.numbers[1:]]
    numbers = torch.tensor(rows, dtype=torch.float64)
    numbers = numbers.to(work.weights[0].device, non_blocking=True)
    for target, rate in zip(numbers[0], rates, strict=True):
        if isinstance(rate, Tensor):
            target.copy_(rate.detach().reshape(()), non_blocking=True)
    return numbers


def stacked(counts: list[Tensor], numbers: Tensor) -> Tensor:
    """Returns the step counters: float64, [weights], on the numbers' device; 0 without counters."""
    if not counts:
        return numbers.new_zeros(())
    return torch.stack(counts).to(numbers, non_blocking=True)


def count_step(counts: list[Tensor], found_inf: Tensor | None) -> None:
    """Counts a step, unless it was skipped."""
    if counts:
        # A tensor: on the CPU, torch makes one of a number for each counter. With alpha: otherwise,
        # torch converts the tensor to a number, which synchronizes with the device.
        is_taken = torch.ones_like(counts[0]) if found_inf is None else 1 - found_inf
        foreach_add_(counts, is_taken.to(counts[0].dtype), alpha=1)

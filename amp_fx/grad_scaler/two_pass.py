"""An optimizer's step in two compiled passes over memory.

The first pass reads the gradients, for their norm and for whether all are finite. The second
unscales, clips and updates in registers, and writes the weights, the optimizer's state and the
cached low-precision copies of the weights: of a weight with AdamW's two moments that is 4 bytes and
30, of which 2 are those of the copy. It reads gradients and, unless that is requested, does not
write them.

Adam, AdamW and SGD are computed for one weight, as values in and values out. The formulas and the
order of their ops are those of torch's own loops over parameters (``_single_tensor_adam``,
``_single_tensor_sgd``), which every other implementation of torch follows within roundings. Numbers
that are the same for all elements of a weight (bias corrections, step sizes) are computed in
float64, as there. ``torch.compile`` of torch's own code computes them in float32, in which
``1 - 0.999**step`` loses up to 5 of its 7 digits.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_fx.grad_scaler.gradients import clip_factor, grads_of, params_of, upcast
from amp_fx.torch_private.kernels import foreach_add_
from amp_fx.torch_private.optimizers import runs_only_own_code
from amp_fx.weights.write_signals import after_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.weights.step_copies import Computed

    States = Sequence[Tensor]

    Flags = tuple[str, ...]

    New = tuple[Tensor, list[Tensor]]


class Rule(NamedTuple):
    """Update of one weight by one kind of optimizer.

    Attributes:
        numbers: Names of a group's settings that are numbers, the learning rate first; they may
            change at any time.
        flags: Names of a group's settings that decide which ops an update has; set if not 0.
        states: Names of the tensors in the optimizer's state of a weight, and the flag with which
            each exists; "" for those that always do.
        counts: True if the state has a step counter, too.
        scalars: Computes the scalars of updates, [scalars, weights], from the counters after the
            step, float64 of shape [weights], and the numbers, float64 of shape [numbers, weights].
        update: Computes the new weight and states from the weight, its gradient, states, scalars
            and flags.
    """

    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    states: dict[str, str]
    counts: bool
    scalars: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[Tensor, Tensor, States, Tensor, Flags], New]


def rule_of(optimizer: Any) -> Rule | None:
    """Returns the rule of an optimizer, or None.

    There is none for optimizers of other classes, with hooks, with a replaced ``step``, that
    differentiate through the step, or that have tensors for settings other than the learning rate.
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


def _is_plain(group: dict[str, Any], rule: Rule) -> bool:
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
    kept = 1 - lr * weight_decay
    return torch.stack(
        [1 - beta1, beta2, 1 - beta2, correction, eps, -step_size, kept, weight_decay]
    )


def _adam(weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: Flags) -> New:
    rest1, beta2, rest2, correction, eps, step_size, kept, weight_decay = scalars.unbind()
    if "maximize" in flags:
        grad = -grad
    if "weight_decay" in flags and "decoupled_weight_decay" in flags:
        weight = weight * kept
    elif "weight_decay" in flags:
        grad = grad + weight_decay * weight
    first = torch.lerp(states[0], grad, rest1)
    second = states[1] * beta2 + rest2 * grad * grad
    largest = torch.maximum(states[2], second) if "amsgrad" in flags else second
    denominator = largest.sqrt() / correction + eps
    weight = weight + step_size * first / denominator
    return weight, [first, second, *([largest] if "amsgrad" in flags else [])]


def _sgd_scalars(counts: Tensor, numbers: Tensor) -> Tensor:  # noqa: ARG001
    lr, momentum, dampening, weight_decay = numbers.unbind()
    return torch.stack([-lr, momentum, 1 - dampening, weight_decay])


def _sgd(weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: Flags) -> New:
    step_size, momentum, rest, weight_decay = scalars.unbind()
    if "maximize" in flags:
        grad = -grad
    if "weight_decay" in flags:
        grad = grad + weight_decay * weight
    if "momentum" not in flags:
        return weight + step_size * grad, []
    buffer = states[0] * momentum + rest * grad
    grad = grad + momentum * buffer if "nesterov" in flags else buffer
    return weight + step_size * grad, [buffer]


_ADAM = Rule(
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("amsgrad", "maximize", "decoupled_weight_decay", "weight_decay"),
    states={"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    counts=True,
    scalars=_adam_scalars,
    update=_adam,
)
_SGD = Rule(
    numbers=("lr", "momentum", "dampening", "weight_decay"),
    flags=("maximize", "weight_decay", "momentum", "nesterov"),
    states={"momentum_buffer": "momentum"},
    counts=False,
    scalars=_sgd_scalars,
    update=_sgd,
)
_RULES: dict[type, Rule] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _SGD,
}


_DEVICES = ("cpu", "cuda")  # other devices may lack float64, in which numbers are computed
_DTYPES = (torch.float32, torch.float64)


class Work(NamedTuple):
    """Tensors of one step; lists are in the order of the weights."""

    rule: Rule
    weights: list[Tensor]  # those with gradients
    grads: list[Tensor]
    states: list[list[Tensor]]
    counts: list[Tensor]  # step counters; empty if there are none
    sizes: tuple[int, ...]  # the number of these weights in each group
    flags: tuple[Flags, ...]


def work_of(optimizer: Any) -> Work | None:
    """Returns the tensors of a step; None if no step of the optimizer can take two passes.

    States and counters are None before the first step, which creates them.
    """
    rule = rule_of(optimizer)
    if rule is None:
        return None
    sizes = tuple([len(grads_of(group["params"])) for group in optimizer.param_groups])
    group_flags = [
        tuple([name for name in rule.flags if group.get(name)]) for group in optimizer.param_groups
    ]
    flags = sum([(own,) * size for own, size in zip(group_flags, sizes, strict=True)], ())
    weights = [param for param in params_of(optimizer) if param.grad is not None]
    grads = grads_of(weights)
    all_states = [optimizer.state.get(weight, {}) for weight in weights]
    states = [
        [state.get(name) for name, flag in rule.states.items() if not flag or flag in own]
        for state, own in zip(all_states, flags, strict=True)
    ]
    counts = [state.get("step") for state in all_states] if rule.counts else []
    tensors = [tensor for tensor in (*weights, *grads, *flat(states)) if tensor is not None]
    return Work(rule, weights, grads, states, counts, sizes, flags) if _are_alike(tensors) else None


def _are_alike(tensors: list[Tensor]) -> bool:
    """Returns True if all are plain and dense, on one device and of one dtype that steps have."""
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
            for tensor in tensors
        )
    )


def measure_of(work: Work, max_norm: float | None, norm_type: float) -> Any:
    """Returns the first pass: flag, norm, the factor that clips, and the updates' scalars."""
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
    """Returns the second pass."""
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
    """Returns the copies that an update writes, and pairs of weights and copies for afterwards.

    On a CPU the pairs are copies with other strides than their weights, such as a convolution's:
    with one of them in the update, inductor transposes tiles, which takes 3 times as long.
    """
    if weights[0].device.type != "cpu":
        return lows, []
    pairs = list(zip(weights, lows, strict=True))
    fused = [[low for low in some if low.stride() == w.stride()] for w, some in pairs]
    apart = [(w, low) for w, some in pairs for low in some if low.stride() != w.stride()]
    return fused, apart


def write_copies(apart: list[tuple[Tensor, Tensor]], computed: list[Computed]) -> None:
    """Writes the copies that an update does not."""
    for weight, low in apart:
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
    """Returns 1.0 if a gradient is not finite, else 0.0: float32, 0-dim."""
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
    if counts and found_inf is None:
        foreach_add_(counts, 1)
    elif counts and found_inf is not None:
        # Without alpha torch takes the tensor for a number, and waits for its value.
        foreach_add_(counts, (1 - found_inf).to(counts[0].dtype), alpha=1)

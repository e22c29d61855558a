"""What torch's Adam, AdamW and SGD do to one weight, as values in and values out.

The formulas and the order of their ops are those of torch's own loops over parameters
(``_single_tensor_adam``, ``_single_tensor_sgd``), which every other implementation of torch follows
within roundings. What depends on numbers alone (bias corrections, step sizes) is computed in
float64, as there, for all weights at once; compiled, torch's own code takes it in float32, where
``1 - 0.999**step`` has lost up to 5 of its 7 digits.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_fx.grad_scaler.torch_private import runs_only_own_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    States = Sequence[Tensor]
    New = tuple[Tensor, list[Tensor]]


class Rule(NamedTuple):
    """How an optimizer updates weights.

    Attributes:
        numbers: names of the settings of a group that are numbers; they may change at any time.
        flags: of a group, what decides on the ops of an update.
        states: names of what a weight has in the optimizer's state, given the flags.
        counts: whether there is a step counter besides.
        scalars: from the counters after the step, float64 of shape [weights], and the numbers,
            float64 of shape [numbers, weights]: what updates take, [scalars, weights].
        update: the weight, its gradient, states, scalars and flags give the new weight and states.
    """

    numbers: tuple[str, ...]
    flags: Callable[[dict[str, Any]], tuple[Any, ...]]
    states: Callable[[Any], tuple[str, ...]]
    counts: bool
    scalars: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[Tensor, Tensor, States, Tensor, Any], New]


def rule_of(optimizer: Any) -> Rule | None:
    """The rule of an optimizer; None for those that there is none for.

    Those are optimizers of other classes, with hooks, with a ``step`` of somebody's own, that
    differentiate through the step, or that have tensors for settings other than the learning rate.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or not runs_only_own_code(optimizer):
        return None
    groups = optimizer.param_groups
    return rule if all(_is_plain(group, rule) for group in groups) else None


def number(group: dict[str, Any], name: str) -> Any:
    """A setting of a group, a number or a 0-dim tensor."""
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


class _AdamFlags(NamedTuple):
    amsgrad: bool
    maximize: bool
    is_decoupled: bool
    has_decay: bool


def _adam_flags(group: dict[str, Any]) -> _AdamFlags:
    return _AdamFlags(
        bool(group["amsgrad"]),
        bool(group["maximize"]),
        bool(group.get("decoupled_weight_decay")),
        group["weight_decay"] != 0,
    )


def _adam_states(flags: _AdamFlags) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if flags.amsgrad else ()))


def _adam_scalars(counts: Tensor, numbers: Tensor) -> Tensor:
    lr, beta1, beta2, eps, weight_decay = numbers.unbind()
    step_size = lr / (1 - beta1**counts)
    correction = (1 - beta2**counts).sqrt()
    kept = 1 - lr * weight_decay
    return torch.stack(
        [1 - beta1, beta2, 1 - beta2, correction, eps, -step_size, kept, weight_decay]
    )


def _adam(
    weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: _AdamFlags
) -> tuple[Tensor, list[Tensor]]:
    rest1, beta2, rest2, correction, eps, step_size, kept, weight_decay = scalars.unbind()
    if flags.maximize:
        grad = -grad
    if flags.has_decay and flags.is_decoupled:
        weight = weight * kept
    elif flags.has_decay:
        grad = grad + weight_decay * weight
    first = torch.lerp(states[0], grad, rest1)
    second = states[1] * beta2 + rest2 * grad * grad
    largest = torch.maximum(states[2], second) if flags.amsgrad else second
    denominator = largest.sqrt() / correction + eps
    weight = weight + step_size * first / denominator
    return weight, [first, second, *([largest] if flags.amsgrad else [])]


class _SGDFlags(NamedTuple):
    maximize: bool
    has_decay: bool
    has_momentum: bool
    nesterov: bool


def _sgd_flags(group: dict[str, Any]) -> _SGDFlags:
    return _SGDFlags(
        bool(group["maximize"]),
        group["weight_decay"] != 0,
        group["momentum"] != 0,
        bool(group["nesterov"]),
    )


def _sgd_states(flags: _SGDFlags) -> tuple[str, ...]:
    return ("momentum_buffer",) if flags.has_momentum else ()


def _sgd_scalars(counts: Tensor, numbers: Tensor) -> Tensor:  # noqa: ARG001
    lr, momentum, dampening, weight_decay = numbers.unbind()
    return torch.stack([-lr, momentum, 1 - dampening, weight_decay])


def _sgd(
    weight: Tensor, grad: Tensor, states: States, scalars: Tensor, flags: _SGDFlags
) -> tuple[Tensor, list[Tensor]]:
    step_size, momentum, rest, weight_decay = scalars.unbind()
    if flags.maximize:
        grad = -grad
    if flags.has_decay:
        grad = grad + weight_decay * weight
    if not flags.has_momentum:
        return weight + step_size * grad, []
    buffer = states[0] * momentum + rest * grad
    grad = grad + momentum * buffer if flags.nesterov else buffer
    return weight + step_size * grad, [buffer]


_ADAM = Rule(
    ("lr", "beta1", "beta2", "eps", "weight_decay"),
    _adam_flags,
    _adam_states,
    True,
    _adam_scalars,
    _adam,
)
_SGD = Rule(
    ("lr", "momentum", "dampening", "weight_decay"),
    _sgd_flags,
    _sgd_states,
    False,
    _sgd_scalars,
    _sgd,
)
_RULES: dict[type, Rule] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _SGD,
}

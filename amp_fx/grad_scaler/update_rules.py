"""Computes torch's Adam, AdamW and SGD for one weight, as values in and values out.

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
    Flags = tuple[str, ...]
    New = tuple[Tensor, list[Tensor]]


class Rule(NamedTuple):
    """Says how an optimizer updates weights.

    Attributes:
        numbers: names of the settings of a group that are numbers; they may change at any time.
        flags: names of the settings that decide on the ops of an update; set if they are not 0.
        states: names of what a weight has in the optimizer's state, and with which flag; "" always.
        counts: whether there is a step counter besides.
        scalars: from the counters after the step, float64 of shape [weights], and the numbers,
            float64 of shape [numbers, weights]: what updates take, [scalars, weights].
        update: the weight, its gradient, states, scalars and flags give the new weight and states.
    """

    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    states: dict[str, str]
    counts: bool
    scalars: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[Tensor, Tensor, States, Tensor, Flags], New]

    def flags_of(self, group: dict[str, Any]) -> Flags:
        """Returns which flags a group has set."""
        return tuple([name for name in self.flags if group.get(name)])

    def states_with(self, flags: Flags) -> list[str]:
        """Returns the names of the states that a weight has with some flags set."""
        return [name for name, flag in self.states.items() if not flag or flag in flags]


def rule_of(optimizer: Any) -> Rule | None:
    """Returns the rule of an optimizer; None for those that have none.

    Those are optimizers of other classes, with hooks, with a ``step`` of somebody's own, that
    differentiate through the step, or that have tensors for settings other than the learning rate.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or not runs_only_own_code(optimizer):
        return None
    groups = optimizer.param_groups
    return rule if all(_is_plain(group, rule) for group in groups) else None


def number(group: dict[str, Any], name: str) -> Any:
    """Returns a setting of a group, a number or a 0-dim tensor."""
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

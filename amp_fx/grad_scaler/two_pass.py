"""An optimizer's step in two passes over memory, compiled; `amp_fx.compile_step`.

The first pass reads the gradients, for their norm and for whether all are finite. The second
unscales, clips and updates in registers, and writes the weights, the optimizer's state and the kept
low-precision copies of the weights: of a weight with AdamW's two moments that is 4 bytes and 30, of
which 2 are those of the copy. It reads gradients and, unless that is asked for, does not write
them.

Adam, AdamW and SGD are computed for one weight, as values in and values out.
The formulas and the order of their ops are those of torch's own loops over parameters
(``_single_tensor_adam``, ``_single_tensor_sgd``), which every other implementation of torch follows
within roundings. What depends on numbers alone (bias corrections, step sizes) is computed in
float64, as there, for all weights at once; compiled, torch's own code takes it in float32, where
``1 - 0.999**step`` has lost up to 5 of its 7 digits.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from amp_fx.errors import ScalerTypeError
from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.gradients import clip_factor, grads_of, upcast
from amp_fx.grad_scaler.processes import params_of
from amp_fx.grad_scaler.torch_private import (
    mark_kept_in_place,
    mark_stepped,
    runs_only_own_code,
    with_own_code,
)
from amp_fx.weights.step_copies import StepCopies

if TYPE_CHECKING:
    from amp_fx.weights.step_copies import Computed
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


def rule_of(optimizer: Any) -> Rule | None:
    """Returns the rule of an optimizer; None for those that have none.

    Those are optimizers of other classes, with hooks, with a ``step`` of somebody's own, that
    differentiate through the step, or that have tensors for settings other than the learning rate.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or not runs_only_own_code(optimizer):
        return None
    return rule if all(_is_plain(group, rule) for group in optimizer.param_groups) else None


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


_DEVICES = ("cpu", "cuda")  # of others float64, in which numbers are computed, is not known
_DTYPES = (torch.float32, torch.float64)


class Work(NamedTuple):
    """Holds what one step works on; lists are in the order of the weights."""

    weights: list[Tensor]  # those with gradients
    grads: list[Tensor]
    states: list[list[Tensor]]  # what the optimizer keeps of each weight
    counts: list[Tensor]  # step counters; empty if there are none
    groups: tuple[int, ...]  # for each weight the position of its group
    flags: tuple[Any, ...]  # what decides on the ops of each update
    rule: Rule


class TwoPassStep:
    """Steps one optimizer; takes the arguments of `compile_step`, and has them as attributes."""

    def __init__(
        self,
        optimizer: Any,
        *,
        max_norm: float | None,
        norm_type: float,
        writes_grads: bool,
        compile_options: dict[str, Any],
    ) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ScalerTypeError(
                f"{type(optimizer).__name__} cannot be compiled: its step needs a closure."
            )
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.writes_grads = writes_grads
        self._options = {"dynamic": False, **compile_options}
        self._may_be_graphs = not self._options.keys().isdisjoint(("mode", "options"))
        self._copies = StepCopies(optimizer)
        self._compiled: dict[Any, tuple[Any, Any]] = {}
        self._numbers: tuple[Any, Tensor] | None = None

    def work(self) -> Work | None:
        """Returns what a step would work on now; None if it has to be done in another way.

        That is so for optimizers that have no rule; for gradients that are sparse, sharded over
        processes, on several devices or of several dtypes, complex or low-precision; for weights
        whose state is yet to be made.
        """
        rule = rule_of(self.optimizer)
        if rule is None:
            return None
        work = gathered(self.optimizer, rule)
        return work if work is not None and _fits(work) else None

    def __call__(
        self, work: Work, inv_scale: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Steps, on what ``work`` gave just now.

        If `inv_scale` is given (float32, 0-dim, on the weights' device), multiplies gradients by
        it, and changes nothing if one of them is not finite then. Returns the flag, if there is an
        `inv_scale`, and the norm of the unscaled gradients, if they are clipped.
        """
        measure, update = self._functions(work, has_scale=inv_scale is not None)
        numbers = self._numbers_of(work.rule, work)
        counts = stacked(work.counts, numbers)
        with torch.no_grad():
            found = measure(work.grads, inv_scale, counts, numbers)
            if self._may_be_graphs:  # and the second takes the memory of the first
                found = [value if value is None else value.clone() for value in found]
            found_inf, norm, factor, scalars = found
            with self._copies.written(work.weights) as (weights, lows, computed):
                pairs = [list(value) for *_, value in computed]
                mark_kept_in_place([*weights, *_all(work.states), *_all(lows), *_all(pairs)])
                fused, apart = _split(weights, lows)
                read = work.grads, scalars, inv_scale, factor, found_inf
                update(weights, fused, work.states, *read)
                if apart or computed:
                    self._write_copies(apart, computed)
            _count(work.counts, found_inf)
        mark_stepped(self.optimizer)
        return found_inf, norm

    @functools.cached_property
    def _write_copies(self) -> Any:
        """Writes the copies that an update does not."""
        return torch.compile(with_own_code(_write_copies), **self._options)

    def _functions(self, work: Work, *, has_scale: bool) -> tuple[Any, Any]:
        """Returns both passes, compiled once for each set of flags."""
        key = work.rule.update, work.flags, work.weights[0].dtype, has_scale
        if key not in self._compiled:
            functions = self._measure(work.rule, work), self._update(work.rule, work.flags)
            measure, update = (torch.compile(with_own_code(f), **self._options) for f in functions)
            self._compiled[key] = measure, update
        return self._compiled[key]

    def _numbers_of(self, rule: Rule, work: Work) -> Tensor:
        """Returns the settings of each weight's group: float64, [numbers, weights], on its device.

        Makes them anew only where one of them is another number; reads a tensor where it is.
        """
        groups = self.optimizer.param_groups
        given = [[number(group, name) for group in groups] for name in rule.numbers]
        values = [[0.0 if isinstance(x, Tensor) else float(x) for x in row] for row in given]
        device = work.weights[0].device
        key = values, work.groups, device
        if self._numbers is None or self._numbers[0] != key:
            rows = [[row[i] for i in work.groups] for row in values]
            made = torch.tensor(rows, dtype=torch.float64).to(device, non_blocking=True)
            self._numbers = key, made
        numbers = self._numbers[1]
        for k, row in enumerate(given):
            for i, value in enumerate(row):
                if isinstance(value, Tensor) and i in work.groups:
                    first = work.groups.index(i)
                    own = numbers[k, first : first + work.groups.count(i)]
                    own.copy_(value.detach().reshape(()), non_blocking=True)
        return numbers

    def _measure(self, rule: Rule, work: Work) -> Any:
        """Makes the first pass: what it found, the factor that clips, and what updates take."""
        max_norm, norm_type = self.max_norm, self.norm_type
        dtype = work.weights[0].dtype

        def measure(
            grads: list[Tensor], inv_scale: Tensor | None, counts: Tensor, numbers: Tensor
        ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
            scalars = rule.scalars(counts + 1, numbers).to(dtype)
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

    def _update(self, rule: Rule, flags: tuple[Any, ...]) -> Any:
        """Makes the second pass."""
        writes_grads = self.writes_grads

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
                if writes_grads:
                    grad.copy_(unscaled)

        return update


def _split(
    weights: list[Tensor], lows: list[list[Tensor]]
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Returns the copies that an update writes, and weights with those that are written after it.

    On a CPU the latter are copies that are laid out in another way than their weights, such as a
    convolution's: next to one, inductor updates in the small tiles that are turned in registers,
    3 times as slowly as all in a row.
    """
    if weights[0].device.type != "cpu":
        return lows, []
    pairs = list(zip(weights, lows, strict=True))
    fused = [[low for low in some if low.stride() == w.stride()] for w, some in pairs]
    apart = [(w, low) for w, some in pairs for low in some if low.stride() != w.stride()]
    return fused, apart


def _write_copies(apart: list[tuple[Tensor, Tensor]], computed: list[Computed]) -> None:
    for weight, low in apart:
        low.copy_(weight)
    for weight, function, targets in computed:
        for target, source in zip(targets, function(weight), strict=True):
            target.copy_(source)


def _all(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _unless(found_inf: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if found_inf is None else torch.where(found_inf != 0, old, new)


def overflow_flag(grads: list[Tensor]) -> Tensor:
    """Returns 1.0 if one of the gradients is not finite, else 0.0: float32, 0-dim."""
    are_finite = torch.stack([grad.isfinite().all() for grad in grads])
    return are_finite.all().logical_not().to(torch.float32)


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of all gradients as one vector, by ops that inductor fuses."""
    norms = [torch.linalg.vector_norm(upcast(g), norm_type) for g in grads if g.numel()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def gathered(optimizer: Any, rule: Rule) -> Work | None:
    """Gathers all that a step reads and writes; None where something is missing."""
    weights, states, counts, groups, flags = [], [], [], [], []
    for index, group in enumerate(optimizer.param_groups):
        group_flags = tuple([name for name in rule.flags if group.get(name)])
        names = [name for name, flag in rule.states.items() if not flag or flag in group_flags]
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = optimizer.state.get(weight, {})
            found = [state.get(name) for name in (*names, *(("step",) if rule.counts else ()))]
            if not all(isinstance(value, Tensor) for value in found):
                return None
            weights.append(weight)
            states.append(found[: len(names)])
            counts.extend(found[len(names) :])
            groups.append(index)
            flags.append(group_flags)
    return Work(weights, grads_of(weights), states, counts, tuple(groups), tuple(flags), rule)


def _fits(work: Work) -> bool:
    """Returns whether all is dense, of one dtype that is not low-precision, and on one device."""
    if not any(grad.numel() for grad in work.grads):
        return False
    first = work.weights[0]
    return (
        first.dtype in _DTYPES
        and first.device.type in _DEVICES
        and all(
            tensor.layout is torch.strided
            and tensor.dtype is first.dtype
            and tensor.device == first.device
            and type(tensor) in (Tensor, torch.nn.Parameter)  # not sharded
            for tensor in (*work.weights, *work.grads, *_all(work.states))
        )
    )


def stacked(counts: list[Tensor], numbers: Tensor) -> Tensor:
    """Returns the step counters: float64, [weights], on their device; one 0 if none count."""
    if not counts:
        return numbers.new_zeros(())
    return torch.stack(counts).to(numbers, non_blocking=True)


def _count(counts: list[Tensor], found_inf: Tensor | None) -> None:
    """Counts a step, unless it was skipped."""
    if counts and found_inf is None:
        torch._foreach_add_(counts, 1)
    elif counts and found_inf is not None:
        # Without alpha torch takes the tensor for a number, and waits for its value.
        torch._foreach_add_(counts, (1 - found_inf).to(counts[0].dtype), alpha=1)


def compile_step(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    write_grads: bool = False,
    **compile_options: Any,
) -> PlainStep:
    """Makes one call out of clipping gradients, stepping, and casting the weights again.

    Use it to train in bfloat16 or float32; with a scaler use `GradScaler.compile_step`. The call
    gives the numbers of ``torch.nn.utils.clip_grad_norm_`` and ``optimizer.step()``, within
    roundings, in two passes over memory. It writes the low-precision copies of weights that amp_fx
    keeps, so that the next forward finds them fresh::

        compiled = torch.compile(model, backend="amp_fx")
        step = amp_fx.compile_step(optimizer, max_norm=1.0)
        for inputs, targets in data:
            optimizer.zero_grad()
            loss_fn(compiled(inputs), targets).backward()
            step()

    Adam, AdamW and SGD take two passes, with any of their settings but `differentiable`, on dense
    float32 or float64 weights on one device, a CPU or CUDA, from the second step on: the first
    makes the optimizer's state. Everything else runs eagerly: those two functions, one after the
    other. A warning says so if an optimizer never takes two passes.

    Gradients that are not finite reach the weights, as they do without this.

    Args:
        optimizer: what to step.
        max_norm: clip gradients to this norm; None does not clip.
        norm_type: the order of the norm.
        write_grads: whether gradients are clipped where they lie, too, which writes 4 bytes more
            for each. Otherwise `.grad` is afterwards what the backward left.
        compile_options: for torch.compile.

    Raises:
        ScalerTypeError: this is not an optimizer, or its step needs a closure.
        ScalerValueError: `max_norm` is negative or not a number.
    """
    two_pass = TwoPassStep(
        arguments.optimizer(optimizer),
        writes_grads=write_grads,
        compile_options=compile_options,
        **arguments.optional_clipping(max_norm, norm_type),
    )
    return PlainStep(two_pass)


class PlainStep:
    """Clips and steps; `compile_step` returns it. Call it once per update.

    Attributes:
        norm: the norm of the gradients at the last call, before clipping: 0-dim. None without
            `max_norm`.
    """

    def __init__(self, two_pass: TwoPassStep) -> None:
        self.norm: Tensor | None = None
        self._two_pass = two_pass
        self._has_warned = False

    def __call__(self) -> Any:
        """Clips and steps.

        Returns:
            What the optimizer's step returns; None from two passes.
        """
        two_pass, optimizer = self._two_pass, self._two_pass.optimizer
        work = two_pass.work()
        if work is not None:
            _, self.norm = two_pass(work)
            return None
        if not self._has_warned and rule_of(optimizer) is None:
            self._has_warned = True
            warnings.warn(
                f"steps of {type(optimizer).__name__} run eagerly: two passes are for "
                "torch's own Adam, AdamW and SGD, without hooks.",
                stacklevel=2,
            )
        if two_pass.max_norm is not None:
            params = params_of(optimizer)
            self.norm = clip_grad_norm_(params, two_pass.max_norm, two_pass.norm_type)
        return optimizer.step()

"""Findings about updates: those that are lost, low states, and the gradient scaler."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.audit.recording import Rule, is_below_float32
from amp_fx.numerics.audit.report import new_finding
from amp_fx.observe.ops import is_tracked
from amp_fx.observe.state import parameters_of
from amp_fx.observe.storages import address_of
from amp_fx.weights.spread import part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from amp_fx.numerics.audit.report import Finding
    from amp_fx.observe.recorder import Event

LEAST_LOST = 0.1
"""The share of a parameter's elements that have to be lost for a finding."""

_FLOAT32_WEIGHTS = "Create the optimizer for float32 weights, so that its state is float32."

State = dict[str, torch.Tensor]


@dataclasses.dataclass
class _Before:
    """One parameter before a step of its optimizer.

    Attributes:
        name: Its path.
        parameter: The parameter.
        value: A copy of its value.
        state: Copies of the optimizer's state of the same shape.
        twin: The parameter in float64, for a twin of the optimizer.
    """

    name: str
    parameter: torch.Tensor
    value: torch.Tensor
    state: State
    twin: torch.Tensor


class UpdateRule(Rule):
    """Finds ``update_lost`` and ``state_low``.

    A twin of the optimizer takes the same step in float64. An update is lost if it is smaller than
    half a unit in the last place of the weight, so that the weight does not change. Optimizers
    with float32 copies, compensated sums or stochastic rounding lose nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[list[_Before], Any]] = {}
        self._site = NodeLocation()

    def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        """Compares the weights and states after a step with those before."""
        if is_over:
            self._end(optimizer)
        else:
            self._site = self.recorder.here()
            self._before[id(optimizer)] = self._prepare(optimizer)

    def _prepare(self, optimizer: Any) -> tuple[list[_Before], Any]:
        """Copies parameters and states with low dtypes, and makes a twin of the optimizer."""
        low = [
            parameter
            for parameter in parameters_of(optimizer)
            if is_below_float32(parameter.dtype)
            or any(
                is_below_float32(value.dtype) for value in _state_of(optimizer, parameter).values()
            )
        ]
        found_inf = getattr(optimizer, "found_inf", None)  # a fused step skips itself
        if not low or (found_inf is not None and found_inf.item()):
            return [], None
        twin, twins = _twin_of(optimizer)
        found = []
        for parameter in low:
            state = {k: v.clone() for k, v in _state_of(optimizer, parameter).items()}
            name = self.recorder.places.path_of(parameter)
            value = part_of(parameter).clone()
            found.append(_Before(name, parameter, value, state, twins[parameter]))
        return found, twin

    def _end(self, optimizer: Any) -> None:
        before, twin = self._before.pop(id(optimizer), ([], None))
        if before:
            _step(twin)
            self._compare(optimizer, before)
        self._see_states(optimizer)

    def _compare(self, optimizer: Any, before: list[_Before]) -> None:
        losses = [(each, _loss(optimizer, each)) for each in before]
        lost = [(each, loss.share) for each, loss in losses if loss.share >= LEAST_LOST]
        lost.sort(key=lambda pair: -pair[1])
        moved = sum(loss.moved for _, loss in losses)
        if lost and moved <= 0.2 * sum(loss.by_chance for _, loss in losses):
            first, _ = lost[0]
            names = ", ".join(f"{each.name} {share:.0%}" for each, share in lost[:3])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            groups = optimizer.param_groups
            rates = (g["lr"] for g in groups if any(p is first.parameter for p in g["params"]))
            message = (
                f"At learning rate {float(next(rates)):g}, elements of {len(lost)} "
                f"parameters cannot move ({names}{more}): their updates are smaller than half a "
                f"unit in the last place of {dtype_name(first.parameter.dtype)}."
            )
            module = first.name.rpartition(".")[0]
            self.found.append(new_finding("update_lost", self._site, message, module))

    def _see_states(self, optimizer: Any) -> None:
        """Examines the states after the step: its first step creates them."""
        keys: dict[str, torch.dtype] = {}
        owners: list[torch.Tensor] = []
        for parameter in parameters_of(optimizer):
            for key, value in _state_of(optimizer, parameter).items():
                if is_below_float32(value.dtype):
                    keys[key] = value.dtype
                    owners.append(parameter)
        if not keys:
            return
        names = sorted({dtype_name(dtype) for dtype in keys.values()})
        dtype = next(iter(keys.values()))
        message = (
            f"The optimizer stores {', '.join(keys)} in {' and '.join(names)}: a change of less "
            f"than {torch.finfo(dtype).eps / 4:.2%} of an element is lost."
        )
        eps = _flushed_eps(optimizer, owners, keys.values())
        if eps:
            message += (
                f" eps={eps:g} is zero in float16: an update divides by zero where the state is."
            )
        has_low_weights = any(is_below_float32(owner.dtype) for owner in owners)
        repair = _FLOAT32_WEIGHTS if has_low_weights else ""
        module = self.recorder.places.path_of(owners[0]).rpartition(".")[0]
        self.found.append(new_finding("state_low", self._site, message, module, repair))


def _flushed_eps(
    optimizer: Any, owners: list[torch.Tensor], dtypes: Iterable[torch.dtype]
) -> float:
    """Returns an ``eps`` that is zero in float16; 0 if there is none, or if kernels use float32."""
    members = {id(owner) for owner in owners}
    for group in optimizer.param_groups:
        eps = group.get("eps")
        is_used = isinstance(eps, float) and not group.get("fused") and torch.float16 in dtypes
        if is_used and any(id(p) in members for p in group["params"]):
            return eps if float(torch.tensor(eps, dtype=torch.float16)) == 0 else 0.0
    return 0.0


class RunningValueRule(Rule):
    """Finds ``state_low`` outside of optimizers: running values that the program adds to.

    Those are tensors that exist before the step, such as a moving average of weights, and that an
    op in place adds a tensor to.

    Args:
        inputs: The inputs of the step, which are new in each step.
    """

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._inputs = {address_of(tensor) for tensor in inputs if is_tracked(tensor)}

    def forward(self, event: Event) -> None:
        """Examines an op in place."""
        if event.name.removeprefix("_foreach_") not in _ADDITIONS or len(event.floats) < 2:
            return
        guard = self.recorder.guard
        for tensor in event.written:
            is_old = not guard.is_allocated(tensor) and address_of(tensor) not in self._inputs
            if is_below_float32(tensor.dtype) and tensor.numel() > 1 and is_old:
                path = self.recorder.places.path_of(tensor, "a tensor")
                message = (
                    f"{event.name} changes {path} in place in {dtype_name(tensor.dtype)}: a change "
                    f"of less than {torch.finfo(tensor.dtype).eps / 4:.2%} of an element is lost."
                )
                self.found.append(new_finding("state_low", event.location, message))


_ADDITIONS = frozenset(("add", "sub", "lerp", "addcmul", "addcdiv"))
"""Names of ops that, in place, change a running value."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1


def _state_of(optimizer: Any, parameter: torch.Tensor) -> State:
    """Returns the optimizer's floating-point state with a parameter's shape, without wrappers."""
    state = optimizer.state.get(parameter, {}).items()
    return {
        str(key): part_of(value)
        for key, value in state
        if _is_tensor(value) and value.shape == parameter.shape
    }


def _twin_of(optimizer: Any) -> tuple[Any, dict[torch.Tensor, torch.Tensor]]:
    """Returns a copy of an optimizer in float64, and its parameters by the original ones."""
    scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it
    twins: dict[torch.Tensor, torch.Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        members = []
        for parameter in group["params"]:
            twin = twins[parameter] = parameter.detach().to(torch.float64, copy=True)
            if parameter.grad is not None:
                grad = parameter.grad.detach().to(torch.float64, copy=True)
                twin.grad = grad if scale is None else grad / scale.to(grad.device)
            members.append(twin)
        plain = {key: False for key in ("fused", "foreach", "capturable") if key in group}
        groups.append({**group, **plain, "params": members})
    made: Any = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    made.param_groups = groups
    made.state = defaultdict(dict)
    for parameter, twin in twins.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            is_count = is_float and key == "step"
            made.state[twin][key] = (
                (value.detach().cpu().clone() if is_count else value.detach().double())
                if is_float
                else copy.deepcopy(value)
            )
    made.grad_scale = made.found_inf = None
    return made, twins


def _step(twin: Any) -> None:
    """Steps a twin without hooks; one that does not support float64 does not change."""
    step = type(twin).step
    with contextlib.suppress(Exception):
        getattr(step, "__wrapped__", step)(twin)


class _Loss(NamedTuple):
    """The updates of one parameter that are smaller than half a unit in the last place.

    Attributes:
        share: The share of lost updates.
        moved: The number of elements that moved by one unit, although the update is smaller.
        by_chance: The expected number with stochastic rounding.
    """

    share: float = 0.0
    moved: int = 0
    by_chance: float = 0.0


def _loss(optimizer: Any, before: _Before) -> _Loss:
    after = part_of(before.parameter)
    if not is_below_float32(after.dtype):
        return _Loss()
    old = before.value.float()
    update = (part_of(before.twin) - before.value).float()
    spacing = _spacing(old, update, torch.finfo(after.dtype))
    parts = update.abs() / spacing
    should_move, is_same = update != 0, after == before.value
    is_lost = should_move & is_same & (parts < 0.5)
    is_small = parts < 0.4
    share = int(is_lost.sum()) / max(1, int(should_move.sum()))
    if share and _is_kept(optimizer, before, update, is_lost):
        share = 0.0
    is_one_step = ~is_same & ((after - old).abs() < 1.5 * spacing)
    return _Loss(share, int((is_small & is_one_step).sum()), float(parts[is_small].sum()))


def _is_kept(optimizer: Any, before: _Before, update: torch.Tensor, is_lost: torch.Tensor) -> bool:
    """Returns True if the optimizer's state has the weight in more bits, or its lost part."""
    places = is_lost.flatten().nonzero().flatten()[:_SAMPLE]

    def sample(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[places].double()

    old, new, wanted = sample(before.value), sample(part_of(before.parameter)), sample(update)
    for key, value in _state_of(optimizer, before.parameter).items():
        now, then = sample(value), torch.zeros_like(old)
        copied = old
        if key in before.state:
            copied = then = sample(before.state[key])
        for change in (now - copied, new + now - old - then, new - now - old + then):
            is_kept = (change - wanted).abs() <= 0.1 * wanted.abs()
            if int(is_kept.sum()) > 0.5 * is_kept.numel():
                return True
    return False


_SAMPLE = 4096
"""The number of lost elements that are compared with the state."""


def _spacing(values: torch.Tensor, update: torch.Tensor, dtype: torch.finfo) -> torch.Tensor:
    """Returns the distance to the next number of a dtype in the direction of an update."""
    mantissa, exponent = torch.frexp(values)
    is_shrinking = (mantissa.abs() == 0.5) & (update * values < 0)
    spacing = dtype.eps * torch.exp2((exponent - 1 - is_shrinking.int()).float())
    smallest = dtype.smallest_normal * dtype.eps
    return torch.where(values == 0, smallest, spacing.clamp(min=smallest))


class ScalerRule(Rule):
    """Finds ``scaler_with_bfloat16`` and ``scaler_missing``.

    Args:
        scalers: The scalers that the step knows.
    """

    def __init__(self, scalers: list[Any]) -> None:
        self._is_scaled = any(scaler.is_enabled() for scaler in scalers)
        self._site: NodeLocation | None = None
        self._float16: Event | None = None
        self._others: set[str] = set()

    def forward(self, event: Event) -> None:
        """Notes the dtypes of products, and the check of gradients by a scaler."""
        if event.name == "_amp_foreach_non_finite_check_and_unscale":
            self._is_scaled = True
            self._site = self._site or self.recorder.here()
        is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in event.floats)
        if not event.flops or not is_trained:
            return
        if any(tensor.dtype == torch.float16 for tensor in event.floats):
            self._float16 = self._float16 or event
        else:
            self._others.update(dtype_name(tensor.dtype) for tensor in event.floats)

    def findings(self) -> Iterator[Finding]:
        """Yields a scaler that does nothing, or one that is missing."""
        if self._float16 is not None and not self._is_scaled:
            region = self._float16.region
            is_known = region is not None and bool(region.site.file)
            site = region.site if is_known and region is not None else self._float16.location
            message = (
                "Gradients are float16 and no scaler is used: those below 6e-8 become zero, those "
                "above 65504 infinite."
            )
            yield new_finding("scaler_missing", site, message, self._float16.location.module)
        elif self._float16 is None and self._is_scaled and self._others:
            names = " and ".join(sorted(self._others))
            message = (
                f"A gradient scaler is used, and products run in {names}, which has the range of "
                "float32: the scaler costs a pass over all gradients, and skips steps."
            )
            yield new_finding("scaler_with_bfloat16", self._site or NodeLocation(), message)

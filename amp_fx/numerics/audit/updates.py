"""Findings about updates: those that are lost, low states, and the gradient scaler."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.audit.recording import Rule, is_below_float32
from amp_fx.numerics.audit.report import new_finding
from amp_fx.numerics.twin import Twin
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
    """

    name: str
    parameter: torch.Tensor
    value: torch.Tensor
    state: State


class UpdateRule(Rule):
    """Finds ``update_lost`` and ``state_low``.

    The ops of the step run a second time, in float32. An update is lost if it is smaller than half
    a unit in the last place of the weight, so that the weight does not change. Optimizers with
    float32 copies or compensated sums lose nothing. Those that draw random numbers are taken to
    round by chance.
    """

    def __init__(self) -> None:
        self._before: dict[int, list[_Before]] = {}
        """Parameters by the identity of an optimizer that is stepping."""
        self._twin, self._is_random = Twin(is_batched=True), False
        self._site = NodeLocation()

    def before(self, event: Event) -> Any:
        """Prepares the second run of an op of a step."""
        if not any(self._before.values()):
            return None
        self._is_random |= event.facts.is_random
        return self._twin.before(event)

    def after(self, event: Event, before: Any) -> None:
        """Runs an op of a step in float32."""
        if any(self._before.values()):
            self._twin.after(event, before)

    def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        """Compares the weights and states after a step with those before."""
        if is_over:
            self._compare(optimizer, self._before.pop(id(optimizer)))
            self._see_states(optimizer)
            return
        self._site = self.recorder.here()
        self._twin, self._is_random = Twin(is_batched=True), False
        self._before[id(optimizer)] = self._copies(optimizer)

    def _copies(self, optimizer: Any) -> list[_Before]:
        """Copies parameters and states with low dtypes."""
        found = []
        for parameter in parameters_of(optimizer):
            state = _state_of(optimizer, parameter)
            if any(is_below_float32(each.dtype) for each in (parameter, *state.values())):
                name = self.recorder.places.path_of(parameter)
                copies = {key: value.clone() for key, value in state.items()}
                found.append(_Before(name, parameter, part_of(parameter).clone(), copies))
        return found

    def _compare(self, optimizer: Any, before: list[_Before]) -> None:
        shares = [(each, self._share_lost(optimizer, each)) for each in before]
        lost = [(each, share) for each, share in shares if share >= LEAST_LOST]
        lost.sort(key=lambda pair: -pair[1])
        if lost and not self._is_random:
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

    def _share_lost(self, optimizer: Any, before: _Before) -> float:
        """Returns the share of updates below half a unit in the last place, that are nowhere."""
        after = part_of(before.parameter)
        if not is_below_float32(after.dtype):
            return 0.0
        old = before.value.float()
        update = self._twin.shadows.of(after) - old
        is_small = update.abs() < _spacing(old, update, torch.finfo(after.dtype)) / 2
        should_move = update != 0
        is_lost = should_move & is_small & (after == before.value)
        share = int(is_lost.sum()) / max(1, int(should_move.sum()))
        return 0.0 if share and _is_kept(optimizer, before, update, is_lost) else share

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
            is_kept = (change - wanted).abs() <= 0.1 * wanted.abs() + 2**-24 * old.abs()
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

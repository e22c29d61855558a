"""Runs a program with a shadow in the reference precision underneath, op by op.

The mode stands below autograd and autocast: it sees casts, views, writes in place, and the
backward, in eager code of any kind. Each op that meets a low dtype runs up to three times
(``ShadowedCall``): as the program has it, on the same inputs in the reference, for its own error,
and on the shadows, for the error since the start; once does for both where the inputs have no
error yet. What cannot be run again is listed as not examined.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.numerics.measures import Measures, exponents, heal, measure_float, rounded_integers
from amp_fx.numerics.places import is_inside
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.records import OpRecord, Rounding
from amp_fx.numerics.shadow import (
    OpFacts,
    Shadows,
    below_everything,
    dropped_out,
    facts_of,
    in_reference,
    is_tracked,
    names_low_dtype,
    tensors_in,
    widened,
)
from amp_fx.numerics.state import random_state
from amp_fx.numerics.storages import address_of
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from amp_fx.graphs.places import NodeLocation
    from amp_fx.numerics.state import StateGuard
    from amp_fx.torch_private.ops import OpOverload

aten = torch.ops.aten

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "mul", "convolution", "linear")
)
"""Kernels in which a rounded position becomes a wrong angle."""


class ShadowedCall:
    """One call of an op, and its repetitions."""

    def __init__(
        self,
        mode: ShadowMode,
        op: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> None:
        self.mode, self.op, self.facts = mode, op, facts
        self.args, self.kwargs, self.tensors = args, kwargs, tensors
        self.shadows = mode.shadows
        self.reference = mode.reference
        self.written = facts.written(args, kwargs)
        self.has_diverged = any(map(self.shadows.has_diverged, tensors))
        self.has_low = any(self.shadows.is_low(t.dtype) for t in tensors)
        self.names_low = names_low_dtype(args, kwargs, mode.reference)
        self.recipe = ""
        self.rounded_to: torch.dtype | None = None

    def is_touched(self) -> bool:
        """Returns True if the reference may have something else here."""
        if self.facts.is_empty:
            return False
        return self.has_diverged or self.has_low or self.names_low

    def run_as_it_is(self) -> Any:
        """Runs the op once: the reference has the same here."""
        if torch.is_grad_enabled():
            self.mode.count_node()
        with DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
        for result in _float_tensors(results):
            if result.numel():
                self._note_origin_of_infinity(result)
        return results

    def _note_origin_of_infinity(self, result: torch.Tensor) -> None:
        """Looks whether the reference, which runs the same here, becomes infinite."""
        if self.mode.is_brief or self.facts.is_empty or not self.tensors:
            return
        with below_everything():
            total = float(result.sum()) if not result.is_complex() else 0.0
            if total - total == 0 or _has_infinity(self.tensors):
                return
        stage, site, _ = self.mode.place(self.facts.name, self.tensors)
        seen = self._new_record(stage, site, result)
        seen.is_origin = True
        seen.max_abs = total
        self.mode.record(seen)

    def run(self) -> Any:
        """Runs the op, repeats it, and measures."""
        is_drawn = self.facts.is_random and (
            self.facts.name.endswith("_like")
            or not any(t.is_floating_point() for t in self.tensors if not _is_in(t, self.written))
        )
        stage, site, number = self.mode.place(self.facts.name, self.tensors)
        inside = {address_of(t) for t in self.tensors}
        with below_everything():
            mixed = self._mixed_arguments() if stage == "forward" and number is not None else None
            before = self._states_before(mixed is not None) if not is_drawn else None
            rewind = self._rewinder() if self.facts.is_random and not is_drawn else None
        with DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
        if not all(map(is_tracked, tensors_in(results))):
            self.mode.leave_out(self.facts.name, site.module, "its result is not a plain tensor")
            return results
        with below_everything():
            if is_drawn or before is None:
                self._follow(results)
                return results
            shadow, repeated, why = self._repeat(before, results, rewind)
            if why:
                self.mode.leave_out(self.facts.name, site.module, why)
                self._follow(results)
                return results
            again = self._again(mixed, rewind) if mixed is not None else None
            seen = self._compare(results, shadow, repeated, (stage, site, number), inside)
            if seen is not None and stage == "forward" and not math.prod(seen.shape) > 1:
                seen.magnitude = self._magnitude(before[0], shadow)
            if again is not None and repeated is not None and number is not None:
                self._note_errors_of_constants(repeated, again, number)
        return results

    def _mixed_arguments(self) -> Any:
        """Low inputs where gradients flow, shadows for constants; None if those are the same.

        Errors of constants, such as a mask of dropout, meet no gradient of their own.
        """
        if self.written or self.op is aten.native_dropout.default:
            return None
        constants = [t for t in self.tensors if not t.requires_grad and t.is_floating_point()]
        if not any(map(self.shadows.has_diverged, constants)):
            return None
        if not any(t.requires_grad for t in self.tensors):
            return None

        def choose(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad or not tensor.is_floating_point():
                return widened(tensor, self.reference)
            return self.shadows.of(tensor)

        return in_reference(self.op, self.args, self.kwargs, choose, self.reference)

    def _note_errors_of_constants(self, repeated: Any, mixed: Any, number: int) -> None:
        """Keeps what the errors of constants do here, for the op that made the constant."""
        constants = [t for t in self.tensors if not t.requires_grad]
        entries = [self.shadows.entry(t) for t in constants if self.shadows.has_diverged(t)]
        origins = [e.origin for e in entries if e is not None and e.origin >= 0]
        if not origins or origins[0] >= len(self.mode.seen):
            return
        seen = self._maker_of_error(self.mode.seen[origins[0]])
        pairs = zip(tensors_in(repeated), tensors_in(mixed), strict=True)
        for position, (with_error, without) in enumerate(pairs):
            if with_error.is_floating_point():
                eps = torch.sub(with_error, without).to(torch.bfloat16)
                self.mode.roundings.setdefault(number, []).append(Rounding(seen, position, eps))

    def _states_before(self, needs_both: bool) -> tuple[Any, Any]:
        """The arguments for both repetitions, taken before the op writes to any."""
        written = {id(t) for t in self.written}

        def from_shadow(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in written:
                return self.shadows.writable(tensor)
            return self.shadows.of(tensor)

        def from_low(tensor: torch.Tensor) -> torch.Tensor:
            wide = widened(tensor, self.reference)
            return tensor.clone() if id(tensor) in written and wide is tensor else wide

        shadow = in_reference(self.op, self.args, self.kwargs, from_shadow, self.reference)
        if not self.has_diverged:
            return shadow, None  # the inputs are the same: one repetition does for both
        if not (self.has_low or self.names_low or needs_both):
            return shadow, None
        return shadow, in_reference(self.op, self.args, self.kwargs, from_low, self.reference)

    def _rewinder(self) -> Any:
        device = next((t.device for t in self.tensors), torch.device("cpu"))
        return random_state(device)

    def _maker_of_error(self, seen: OpRecord) -> OpRecord:
        """The op that made the error of a constant, not the one that has passed it on."""
        while seen.inputs and seen.local < seen.accumulated / 2:
            above = [self.mode.seen[i] for i in seen.inputs if i < len(self.mode.seen)]
            if not above:
                break
            seen = max(above, key=lambda s: s.accumulated)
        return seen

    def _repeat(self, before: tuple[Any, Any], results: Any, rewind: Any) -> tuple[Any, Any, str]:
        """The results of both repetitions; or why there are none."""
        if self.op is aten.native_dropout.default:
            mask = results[1]
            found = [
                (dropped_out(given[0][0], self.args, mask), mask) if given is not None else None
                for given in before
            ]
            return found[0], found[1] or (found[0] if not self.has_diverged else None), ""
        try:
            shadow = self._again(before[0], rewind)
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
            line = str(error).strip().split("\n")[0]
            return None, None, f"it does not run in {dtype_name(self.reference)} ({line})"
        if _shapes(shadow) != _shapes(results):
            return None, None, "its sizes depend on the numbers, which differ"
        if before[1] is not None:
            return shadow, self._again(before[1], rewind), ""
        return shadow, None if self.has_diverged else shadow, ""

    def _again(self, call: tuple[Any, Any], rewind: Any) -> Any:
        args, kwargs = call
        if rewind is None:
            return self.op(*args, **kwargs)
        after = self._rewinder()
        rewind()
        try:
            return self.op(*args, **kwargs)
        finally:
            after()

    def _follow(self, results: Any) -> None:
        """Sets the shadow to what the low program has."""
        for tensor in [*tensors_in(results), *self.written]:
            if self.shadows.has_diverged(tensor):
                self.shadows.put(tensor, widened(tensor, self.reference), is_fresh=False)

    def _compare(
        self,
        results: Any,
        shadow: Any,
        repeated: Any,
        place: tuple[str, NodeLocation, int | None],
        inside: set[int],
    ) -> OpRecord | None:
        stage, site, number = place
        low, high = tensors_in(results), tensors_in(shadow)
        same = tensors_in(repeated) if repeated is not None else [None] * len(low)
        first = next((t for t in low if t.is_floating_point()), low[0] if low else None)
        if first is None:
            return None
        seen = self._new_record(stage, site, first)
        is_measured = self.mode.is_wanted(site) and stage != "again"
        errors: list[tuple[torch.Tensor, float]] = []
        for position, (result, second, third) in enumerate(zip(low, high, same, strict=True)):
            is_written = _is_in(result, self.written)
            if not (result.is_floating_point() or result.is_complex()):
                differs = self._compare_discrete(seen, result, second)
                errors += [(result, seen.accumulated_in)] if differs else []
                continue
            wide = widened(second, self.reference)
            again = None if third is None else widened(third, self.reference)
            if second is third:
                again = wide
            is_counted = is_measured and not (position and self.facts.saves)
            error = 0.0
            if is_counted or self.shadows.is_low(result.dtype):
                error = self._measure(seen, position, result, wide, again, number, is_counted)
            errors.append((result, error))
            if is_written or address_of(result) in inside:
                continue
            if self.has_diverged or self.has_low or self.shadows.is_low(result.dtype):
                fresh = not _is_in(second, high[:position]) and not _shares(second, self.tensors)
                self.shadows.put(result, wide, is_fresh=fresh)
        if is_measured and stage == "forward" and self.facts.name in PRODUCTS:
            seen.integers = self._rounded_integers()
        is_recorded = is_measured and bool(seen.numel or seen.flips)
        if is_recorded:
            self.mode.record(seen)
        for result, error in errors:
            entry = self.shadows.note(result)
            entry.origin, entry.error = (seen.index if is_recorded else -1), error
        return seen if is_recorded else None

    def _rounded_integers(self) -> float:
        """The largest of integers that a low input has rounded; 0 where there are none."""
        pairs = [(t, self.shadows.of(t)) for t in self.tensors if self.shadows.is_low(t.dtype)]
        return max((rounded_integers(low, exact) for low, exact in pairs), default=0.0)

    def _magnitude(self, before: tuple[Any, Any], shadow: Any) -> float:
        """Returns the size of a scalar of the reference, or its size if nothing cancelled."""
        args, kwargs = before
        if self.facts.name in ("aten::mean", "aten::sum"):
            shadow = self.op(args[0].abs(), *args[1:], **kwargs)
        sizes = [abs(complex(t)) for t in tensors_in(shadow) if t.numel() == 1]
        return max(sizes, default=0.0)

    def _compare_discrete(self, seen: OpRecord, result: torch.Tensor, shadow: torch.Tensor) -> bool:
        """Counts what differs, and says whether anything does."""
        if result is shadow or torch.equal(result, shadow):
            self.shadows.forget(result)
            return False
        seen.flips += int(torch.count_nonzero(result != shadow))
        if not _is_in(result, self.written):
            self.shadows.put(result, shadow, is_fresh=True)
        return True

    def _measure(
        self,
        seen: OpRecord,
        position: int,
        result: torch.Tensor,
        shadow: torch.Tensor,
        repeated: torch.Tensor | None,
        number: int | None,
        is_measured: bool,
    ) -> float:
        """Heals a result, adds its numbers to the record, and gives its error since the start."""
        is_low = self.shadows.is_low(result.dtype) or self.rounded_to is not None
        counts_zeros = is_low and torch.finfo(result.dtype).smallest_normal > 1e-30
        found, eps = measure_float(
            result, repeated if is_low else None, shadow, counts_zeros=counts_zeros
        )
        if found.inherited and not _has_infinity(self.tensors):
            found.singular = found.inherited
        if found.overflows > found.fills or found.poisoned or found.singular:
            heal(result, repeated, shadow, is_singular=bool(found.singular))
            self.mode.num_healed += 1
        if not is_measured:
            return found.accumulated
        is_finite = found.max_abs - found.max_abs == 0
        seen.is_origin |= not is_finite and not _has_infinity(
            [self.shadows.of(t) for t in self.tensors]
        )
        seen.add(found)
        if seen.stage == "backward" and counts_zeros and found.numel:
            self.mode.exponents.append((exponents(shadow), found))
        if eps is not None and number is not None and seen.stage == "forward" and found.local_sq:
            eps = eps if found.is_finite else torch.where(eps.isfinite(), eps, 0)
            self._keep(Rounding(seen, position, eps.to(torch.bfloat16)), result, number)
        return found.accumulated

    def _keep(self, rounding: Rounding, result: torch.Tensor, number: int) -> None:
        """Keeps an error until its gradient is there."""
        if _is_in(result, self.written):
            rounding.is_written = True
            if result._is_view():
                rounding.geometry = (result.size(), result.stride(), result.storage_offset())
        self.mode.roundings.setdefault(number, []).append(rounding)

    def _new_record(self, stage: str, site: NodeLocation, result: torch.Tensor) -> OpRecord:
        entries = [self.shadows.entry(t) for t in self.tensors]
        known = [entry for entry in entries if entry is not None]
        return OpRecord(
            **site._asdict(),
            index=len(self.mode.seen),
            stage=stage,
            kernel=self.facts.name,
            dtype=dtype_name(self.rounded_to or result.dtype),
            recipe=self.recipe,
            shape=tuple(result.shape),
            accumulated_in=max((entry.error for entry in known), default=0.0),
            inputs=tuple(dict.fromkeys(e.origin for e in known if e.origin >= 0)),
        )


def _float_tensors(results: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(results) if t.is_floating_point()]


def _shapes(results: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(results)]


def _is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _shares(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(address_of(tensor) == address_of(other) for other in tensors)


def _has_infinity(tensors: list[torch.Tensor]) -> bool:
    """Returns True if any has an infinite element or a NaN."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    return any(not bool(t.isfinite().all()) for t in floats)


class ShadowMode(Recorder):  # type: ignore[no-untyped-call]
    """Runs everything under it with a shadow."""

    def __init__(
        self,
        reference: torch.dtype,
        guard: StateGuard,
        modules: tuple[str, ...] | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        super().__init__(guard)
        self.shadows = Shadows(reference)
        self.seen: list[OpRecord] = []
        self.exponents: list[tuple[torch.Tensor, Measures]] = []
        """Binary exponents of samples of low gradients, and the numbers of these."""
        self.not_examined: dict[tuple[str, str], str] = {}
        self.roundings: dict[int, list[Rounding]] = {}
        self.roots: list[float] = []
        """What the step itself has called ``backward`` of, in the reference."""
        self.measured_nodes: set[int] = set()
        """Nodes of custom functions whose forward and backward are each measured as one op."""
        self.num_healed = 0
        self.reference = reference
        self._modules = modules
        self.is_brief = is_brief

    def run(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Runs an op, and what of it has to be repeated."""
        if not all(map(is_tracked, tensors)):
            return self.run_other(op, args, kwargs)
        facts = facts_of(op)
        if facts.is_view:
            results = op(*args, **kwargs)
            if _all_share(results, tensors):
                self.count_node()
                return results
        call = ShadowedCall(self, op, facts, args, kwargs, tensors)
        return call.run() if call.is_touched() else call.run_as_it_is()

    def run_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what cannot be examined."""
        why = "it is not an op on plain tensors"
        self.leave_out(str(func), self.places.here("").module, why)
        return super().run_other(func, args, kwargs)

    def see_wrapped(self, tensor: torch.Tensor) -> None:
        """Lists a tensor that consists of others as not examined."""
        why = "what ops on the tensors that it consists of do to the loss is not known"
        self.leave_out(type(tensor).__name__, self.places.here("").module, why)

    def leave_out(self, op: str, module: str, why: str) -> None:
        """Lists an op as not examined."""
        self.not_examined.setdefault((op, module), why)

    def is_wanted(self, site: NodeLocation) -> bool:
        """Returns True if ops of a site are measured."""
        return self._modules is None or is_inside(site.module, self._modules)

    def magnitude_of(self, loss: torch.Tensor) -> float:
        """Returns the size of the loss in the reference, or of the scalars that it is made of."""
        entry = self.shadows.entry(loss)
        pending = [entry.origin] if entry is not None else []
        known, largest = set(pending), abs(float(self.shadows.of(loss)))
        while pending:
            index = pending.pop()
            if not 0 <= index < len(self.seen) or math.prod(self.seen[index].shape) > 1:
                continue
            largest = max(largest, self.seen[index].magnitude)
            pending += [i for i in self.seen[index].inputs if i not in known]
            known.update(pending)
        return largest

    def record(self, seen: OpRecord) -> None:
        """Adds the record of an op; what a checkpoint computes again was there before."""
        if seen.stage != "again":
            self.seen.append(seen)


def _all_share(results: Any, tensors: list[torch.Tensor]) -> bool:
    """Returns True if results are views, as an op's schema says that they may be."""
    addresses = {address_of(t) for t in tensors}
    return all(address_of(t) in addresses for t in tensors_in(results))

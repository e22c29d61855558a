"""Runs a shadow beside a program, a second program in the reference precision.

The recorder is below autograd and autocast, so it observes casts, views, writes in place and the
backward of any eager code. An op with low inputs or results runs up to three times
(``ShadowedCall``): as in the program; in the reference on the same inputs, which gives its own
error; and in the reference on the shadows, which gives the error since the start. If the inputs
have no error yet, one repetition gives both. Ops that cannot be repeated are listed as not
examined.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.measures import Measures, Readings, heal, measure_float
from amp_fx.numerics.records import OpRecord, OutputError
from amp_fx.numerics.shadow import HALF_TO_FLOAT, Shadows, dropped_out, wide_dtype
from amp_fx.observe.ops import is_tracked
from amp_fx.observe.places import is_inside
from amp_fx.observe.recorder import Event, Sink
from amp_fx.observe.storages import address_of
from amp_fx.random_states import random_state
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.graphs.locations import NodeLocation

    Chooser = Callable[[torch.Tensor], torch.Tensor]
    Repetition = Callable[[Any], Any]
    """Repeats the op, given its results in the program."""

aten = torch.ops.aten

MEASURED = ("forward", "backward")
"""The stages whose ops are measured."""


class ShadowedCall:
    """One call of an op, and its repetitions in the reference.

    Args:
        twin: The sink that the call belongs to.
        event: The call.
    """

    def __init__(self, twin: Twin, event: Event) -> None:
        self.twin, self.event, self.shadows = twin, event, twin.shadows
        self.op, self.facts, self.args = event.op, event.facts, event.args
        self.tensors, self.written = event.tensors, event.written
        if event.kwargs.get("beta") == 0:  # sums with products do not read their first argument
            self.tensors = [tensor for tensor in self.tensors if tensor is not event.args[0]]
        self.has_diverged = any(map(self.shadows.has_diverged, self.tensors))
        self.has_low = any(self.shadows.is_low(t.dtype) for t in self.tensors)
        values = (*event.args, *event.kwargs.values())
        dtypes = [value for value in values if isinstance(value, torch.dtype)]
        self.names_low = any(map(self.shadows.is_low, dtypes))
        may_differ = self.has_diverged or self.has_low or self.names_low
        self.is_affected = may_differ and not self.facts.is_empty

    def prepare(self) -> None:
        """Chooses the inputs of the repetitions, before the op overwrites its own."""
        given = (t for t in self.tensors if not _is_in(t, self.written))
        is_drawn = self.facts.is_random and (
            self.facts.name.endswith("_like") or not any(t.is_floating_point() for t in given)
        )
        self.event.place  # noqa: B018 - found before the op makes its node of autograd
        self.inside = {address_of(t) for t in self.tensors}
        self.mixed = self._mixed_repetition()
        has_mixed = self.mixed is not None
        self.repetitions = None if is_drawn else self._repetitions(has_mixed=has_mixed)

    def finish(self) -> None:
        """Repeats the op, and measures its results."""
        results = self.event.result
        if not all(map(is_tracked, self.event.results)):
            self._leave_out("its result is not a plain tensor")
            return
        if self.repetitions is None:
            self._follow()
            return
        try:
            shadow, repeated = self._repeat(self.repetitions, results)
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
            line = str(error).strip().split("\n")[0]
            self._follow()
            self._leave_out(f"it does not run in float32 ({line})")
            return
        if _shapes(shadow) != _shapes(results):
            self._follow()
            self._leave_out("its sizes depend on values, which differ")
            return
        again = None if self.mixed is None else self.mixed(results)
        self.compare(results, shadow, repeated, self.inside)
        if again is not None and repeated is not None:
            self._note_errors_of_constants(repeated, again)

    def _leave_out(self, why: str) -> None:
        self.twin.leave_out(self.facts.name, self.event.location.module, why)

    def _follow(self) -> None:
        """Sets the shadows of results to the results, because the op was not repeated."""
        for tensor in [*self.event.results, *self.written]:
            if self.shadows.has_diverged(tensor):
                self.shadows.put(tensor, self.shadows.widened(tensor), is_fresh=False)

    def _repetition(self, choose: Chooser) -> Repetition:
        """Returns a function that runs the op in the reference, with the same random numbers.

        The arguments are chosen at once, before the op writes to them.
        """
        if self.op is aten.native_dropout.default:
            kept = choose(self.args[0])
            return lambda results: dropped_out(kept, self.args, results[1])

        def change(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return choose(value)
            return wide_dtype(value) if isinstance(value, torch.dtype) else value

        args, kwargs = pytree.tree_map(change, (self.args, self.event.kwargs))
        if self.op in HALF_TO_FLOAT and len(args) == 3:
            args = (*args[:2], False)
        run = functools.partial(self.op, *args, **kwargs)
        if not self.facts.is_random:
            return lambda _: run()
        device = next((t.device for t in self.tensors), torch.device("cpu"))
        rewind = random_state(device)

        def rewound(_: Any) -> Any:
            restore = random_state(device)
            rewind()
            try:
                return run()
            finally:
                restore()

        return rewound

    def _mixed_repetition(self) -> Repetition | None:
        """Low inputs where gradients flow, shadows for constants; None if those are the same.

        The error of a constant, such as a mask of dropout, meets no gradient by itself.
        """
        is_forward = self.event.stage == "forward" and self.event.place.number is not None
        if not is_forward or self.written or self.op is aten.native_dropout.default:
            return None
        constants = [t for t in self.tensors if not t.requires_grad and t.is_floating_point()]
        if not any(map(self.shadows.has_diverged, constants)):
            return None
        if not any(t.requires_grad for t in self.tensors):
            return None

        def choose(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad or not tensor.is_floating_point():
                return self.shadows.widened(tensor)
            return self.shadows.of(tensor)

        return self._repetition(choose)

    def _note_errors_of_constants(self, repeated: Any, mixed: Any) -> None:
        """Notes the error that constants cause here, for the op that made the first of them."""
        constants = [t for t in self.tensors if not t.requires_grad]
        entries = [self.shadows.entry(t) for t in constants if self.shadows.has_diverged(t)]
        origins = [e.origin for e in entries if e is not None and e.origin >= 0]
        if not origins or origins[0] >= len(self.twin.seen):
            return
        seen = self.twin.seen[origins[0]]
        pairs = zip(leaf_tensors(repeated), leaf_tensors(mixed), strict=True)
        for position, (with_error, without) in enumerate(pairs):
            if with_error.is_floating_point():
                eps = torch.sub(with_error, without).to(torch.bfloat16)
                self._keep(OutputError(seen, position, eps, is_of_constant=True))

    def _repetitions(self, *, has_mixed: bool) -> tuple[Repetition, Repetition | None]:
        """Returns the repetitions on the shadows and on the same inputs; None if none is needed."""
        written = {id(t) for t in self.written}

        def from_shadow(tensor: torch.Tensor) -> torch.Tensor:
            is_written = id(tensor) in written
            return self.shadows.writable(tensor) if is_written else self.shadows.of(tensor)

        def from_low(tensor: torch.Tensor) -> torch.Tensor:
            wide = self.shadows.widened(tensor)
            return tensor.clone() if id(tensor) in written and wide is tensor else wide

        shadow = self._repetition(from_shadow)
        # If the inputs have no errors, one repetition gives both results.
        if self.has_diverged and (self.has_low or self.names_low or has_mixed):
            return shadow, self._repetition(from_low)
        return shadow, None

    def _repeat(
        self, before: tuple[Repetition, Repetition | None], results: Any
    ) -> tuple[Any, Any]:
        """Returns the results of both repetitions."""
        shadow = before[0](results)
        if before[1] is not None and _shapes(shadow) == _shapes(results):
            return shadow, before[1](results)
        return shadow, None if self.has_diverged else shadow

    def compare(self, results: Any, shadow: Any, repeated: Any, inside: set[int]) -> None:
        """Measures results, and sets their shadows.

        Args:
            results: The results of the op in the program.
            shadow: Those of the reference program.
            repeated: Those of the op in the reference on the same inputs; None if it ran so.
            inside: Addresses of storages whose shadows are set already.
        """
        low, high = leaf_tensors(results), leaf_tensors(shadow)
        same = leaf_tensors(repeated) if repeated is not None else [None] * len(low)
        first = next((t for t in low if t.is_floating_point()), low[0] if low else None)
        if first is None:
            return
        seen = self._new_record(first)
        is_measured = self.event.stage in MEASURED
        errors: list[tuple[torch.Tensor, Measures | None]] = []
        num_counted = 0
        for position, (result, second, third) in enumerate(zip(low, high, same, strict=True)):
            if not (result.is_floating_point() or result.is_complex()):
                differs = self._compare_discrete(seen, result, second)
                errors += [(result, self._passed_on(seen))] if differs else []
                continue
            wide = self.shadows.widened(second)
            again = wide if second is third else third
            again = None if again is None else self.shadows.widened(again)
            is_counted = is_measured and not (position and self.facts.saves)
            found = None
            is_low = self.shadows.is_low(result.dtype)
            if is_counted or (is_low and self.event.stage != "update"):  # an update is not healed
                found = self._measure(seen, position, result, wide, again, is_counted)
                num_counted += found.numel if is_counted else 0
            errors.append((result, found))
            if _is_in(result, self.written) or address_of(result) in inside:
                continue
            if self.has_diverged or self.has_low or is_low:
                fresh = not _is_in(second, high[:position]) and not _shares(second, self.tensors)
                self.shadows.put(result, wide, is_fresh=fresh)
        is_recorded = is_measured and bool(num_counted or seen.flips)
        if is_recorded:
            self.twin.seen.append(seen)
        for result, found in errors:
            entry = self.shadows.note(result)
            entry.origin, entry.measures = (seen.index if is_recorded else -1), found

    def _passed_on(self, seen: OpRecord) -> Measures:
        """Returns measures with the error of the inputs."""
        found = Measures(shadow_sq=1.0)

        def fill(_: list[float]) -> None:
            found.error_sq = seen.accumulated_in**2

        self.twin.readings.add([], fill)
        return found

    def _compare_discrete(self, seen: OpRecord, result: torch.Tensor, shadow: torch.Tensor) -> bool:
        """Counts the elements that differ, and returns True if there are any."""
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
        is_counted: bool,
    ) -> Measures:
        """Heals a result, adds its measures to the record, and returns them."""
        is_low = self.shadows.is_low(result.dtype)
        counts_zeros = is_low and torch.finfo(result.dtype).smallest_normal > 1e-30
        readings = self.twin.readings
        found, eps = measure_float(
            readings, result, repeated if is_low else None, shadow, counts_zeros=counts_zeros
        )
        if found.inherited and not _has_infinity(self.tensors):
            found.singular = found.inherited
        if found.overflows > found.fills or found.poisoned or found.singular:
            heal(result, repeated, shadow, is_singular=bool(found.singular))
            self.twin.num_healed += 1
        if not is_counted:
            return found
        readings.add([], lambda _: seen.add(found))
        has_error = found.local_sq or readings.is_batched
        if eps is not None and seen.stage == "forward" and has_error:
            eps = eps if found.is_finite else torch.where(eps.isfinite(), eps, 0)
            output_error = OutputError(seen, position, eps.to(torch.bfloat16))
            if _is_in(result, self.written):
                output_error.is_written = True
                if result._is_view():
                    geometry = result.size(), result.stride(), result.storage_offset()
                    output_error.geometry = geometry
            self._keep(output_error)
        return found

    def _keep(self, output_error: OutputError) -> None:
        """Keeps an error until its gradient arrives."""
        if self.event.place.number is not None:
            self.twin.output_errors.setdefault(self.event.place.number, []).append(output_error)

    def _new_record(self, result: torch.Tensor) -> OpRecord:
        entries = [self.shadows.entry(t) for t in self.tensors]
        known = [entry for entry in entries if entry is not None]
        measures = [entry.measures for entry in known if entry.measures is not None]
        made = OpRecord(
            **self.event.location._asdict(),
            index=len(self.twin.seen),
            stage=self.event.stage,
            kernel=self.facts.name,
            dtype=dtype_name(result.dtype),
            shape=tuple(result.shape),
            inputs=tuple(dict.fromkeys(e.origin for e in known if e.origin >= 0)),
        )

        def fill(_: list[float]) -> None:
            made.accumulated_in = max((each.accumulated for each in measures), default=0.0)

        self.twin.readings.add([], fill)
        return made


def _shapes(results: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in leaf_tensors(results)]


def _is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _shares(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Returns True if a tensor shares its storage with another, as the schema of a view allows."""
    return any(address_of(tensor) == address_of(other) for other in tensors)


def _has_infinity(tensors: list[torch.Tensor]) -> bool:
    """Returns True if any has an infinite element or a NaN."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    return any(not bool(t.isfinite().all()) for t in floats)


class Twin(Sink):
    """Runs the shadow of a program beside it.

    Args:
        modules: Patterns of modules; None for all. Other ops run in the program only, so that
            the reference of these modules begins with the inputs that they get there.
        is_batched: True to read measures at the end; overflows are not healed then.
    """

    def __init__(self, modules: tuple[str, ...] | None = None, *, is_batched: bool = False) -> None:
        self.shadows, self.readings = Shadows(), Readings(is_batched=is_batched)
        self.seen: list[OpRecord] = []
        self.not_examined: dict[tuple[str, str], str] = {}
        self.output_errors: dict[int, list[OutputError]] = {}
        """Errors by the number of the node of autograd whose gradients they meet."""
        self.num_healed = 0
        self._modules = modules

    def before(self, event: Event) -> ShadowedCall | None:
        """Prepares the repetitions of an op if the reference may differ."""
        if not all(map(is_tracked, event.tensors)):
            self.leave_out(str(event.op), event.location.module, "it is not an op on plain tensors")
            return None
        if event.facts.is_view:
            return None
        if self._modules is not None and not self.is_wanted(event.location):
            for tensor in event.written:
                self.shadows.forget(tensor)
            return None
        return self._prepared(event)

    def after(self, event: Event, before: ShadowedCall | None) -> None:
        """Repeats an op and measures its results."""
        call = before
        is_view = event.facts.is_view and all(map(is_tracked, (*event.results, *event.tensors)))
        is_copy = is_view and not all(_shares(t, event.tensors) for t in event.results)
        if is_copy and self.is_wanted(event.location):
            call = self._prepared(event)  # a view that copied; it has overwritten nothing
        if call is not None:
            call.finish()

    def _prepared(self, event: Event) -> ShadowedCall | None:
        """Returns the repetitions of an op; None if the reference cannot differ."""
        call = ShadowedCall(self, event)
        if not call.is_affected:
            return None
        call.prepare()
        return call

    def leave_out(self, op: str, module: str, why: str) -> None:
        """Lists an op as not examined."""
        self.not_examined.setdefault((op, module), why)

    def is_wanted(self, location: NodeLocation) -> bool:
        """Returns True if ops at a location are measured."""
        return self._modules is None or is_inside(location.module, self._modules)

"""Runs a program together with its shadow, a second program in the reference precision.

The mode is below autograd and autocast, so it observes casts, views, writes in place and the
backward of any eager code. An op with low inputs or results runs up to three times
(``ShadowedCall``): as in the program; in the reference on the same inputs, which gives its own
error; and in the reference on the shadows, which gives the error since the start. If the inputs
have no error yet, one repetition gives both. Ops that cannot be repeated are listed as not
examined.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.running import leaf_tensors
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.measures import Measures, exponents, heal, measure_float, rounded_integers
from amp_fx.numerics.places import is_inside
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.records import OpRecord, OutputError
from amp_fx.numerics.shadow import (
    HALF_TO_FLOAT,
    OpFacts,
    Shadows,
    below_everything,
    dropped_out,
    facts_of,
    is_tracked,
)
from amp_fx.numerics.storages import address_of
from amp_fx.numerics.suspects import OpGraph
from amp_fx.random_states import random_state
from amp_fx.torch_private import pytree
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.state import StateGuard
    from amp_fx.regions.module_paths import ModulePaths
    from amp_fx.torch_private.ops import OpOverload

    Chooser = Callable[[torch.Tensor], torch.Tensor]
    Repetition = Callable[[Any], Any]
    """Repeats the op, given its results in the program."""

aten = torch.ops.aten

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "mul", "convolution", "linear")
)
"""Kernels in which a rounded position becomes a wrong angle."""


@dataclasses.dataclass
class ShadowedCall:
    """One call of an op, and its repetitions in the reference.

    Attributes:
        mode: The mode that runs the op.
        op: The op; None for a product in float8.
        facts: The facts about the op.
        args: The arguments.
        kwargs: The named arguments.
        tensors: The tensors among them.
        recipe: The recipe of a product in float8; else empty.
        rounded_to: The dtype of the operands of such a product.
        stage: ``"forward"``, ``"backward"`` or ``"again"``.
        location: The location of the op in the program.
        number: The number of its node of autograd; None without one.
    """

    mode: ShadowMode
    op: Any
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    recipe: str = ""
    rounded_to: torch.dtype | None = None
    stage: str = ""
    location: NodeLocation = dataclasses.field(default_factory=NodeLocation)
    number: int | None = None

    def __post_init__(self) -> None:
        self.shadows = self.mode.shadows
        self.written = self.facts.written(self.args, self.kwargs)
        self.has_diverged = any(map(self.shadows.has_diverged, self.tensors))
        self.has_low = any(self.shadows.is_low(t.dtype) for t in self.tensors)
        dtypes = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.dtype)]
        self.names_low = any(map(self.shadows.is_low, dtypes))
        may_differ = self.has_diverged or self.has_low or self.names_low
        self.is_affected = may_differ and not self.facts.is_empty

    def run_once(self) -> Any:
        """Runs the op as in the program, if the reference runs the same op on the same inputs."""
        if torch.is_grad_enabled():
            self.mode.count_node()
        with DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
        for result in leaf_tensors(results):
            if result.is_floating_point() and result.numel():
                self._note_origin_of_infinity(result)
        return results

    def _note_origin_of_infinity(self, result: torch.Tensor) -> None:
        """Records an op of the reference that makes infinite numbers from finite ones."""
        if self.facts.is_empty or not self.tensors:
            return
        with below_everything():
            total = float(result.sum())
            if math.isfinite(total) or _has_infinity(self.tensors):
                return
        self.locate()
        seen = self._new_record(result)
        seen.is_origin = True
        seen.max_abs = total
        self.mode.record(seen)

    def locate(self) -> None:
        """Finds the stage and the location of the op."""
        self.stage, self.location, self.number = self.mode.place(self.facts.name, self.tensors)

    def run(self) -> Any:
        """Runs the op, repeats it, and measures its results."""
        given = (t for t in self.tensors if not _is_in(t, self.written))
        is_drawn = self.facts.is_random and (
            self.facts.name.endswith("_like") or not any(t.is_floating_point() for t in given)
        )
        self.locate()
        inside = {address_of(t) for t in self.tensors}
        with below_everything():
            mixed = self._mixed_repetition()
            before = None if is_drawn else self._repetitions(has_mixed=mixed is not None)
        with DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
        if not all(map(is_tracked, leaf_tensors(results))):
            return self._left_out(results, "its result is not a plain tensor")
        with below_everything():
            if before is None:
                return self._followed(results)
            try:
                shadow, repeated = self._repeat(before, results)
            except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
                line = str(error).strip().split("\n")[0]
                why = f"it does not run in {dtype_name(self.shadows.reference)} ({line})"
                return self._left_out(self._followed(results), why)
            if _shapes(shadow) != _shapes(results):
                why = "its sizes depend on values, which differ"
                return self._left_out(self._followed(results), why)
            again = None if mixed is None else mixed(results)
            seen = self.compare(results, shadow, repeated, inside)
            if seen is not None and self.stage == "forward" and not math.prod(seen.shape) > 1:
                seen.magnitude = self._magnitude(shadow)
            if again is not None and repeated is not None:
                self._note_errors_of_constants(repeated, again)
        return results

    def _left_out(self, results: Any, why: str) -> Any:
        self.mode.leave_out(self.facts.name, self.location.module, why)
        return results

    def _followed(self, results: Any) -> Any:
        """Sets the shadows of results to the results, because the op was not repeated."""
        for tensor in [*leaf_tensors(results), *self.written]:
            if self.shadows.has_diverged(tensor):
                self.shadows.put(tensor, self.shadows.widened(tensor), is_fresh=False)
        return results

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
            return self.shadows.wide(value) if isinstance(value, torch.dtype) else value

        args, kwargs = pytree.tree_map(change, (self.args, self.kwargs))
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
        is_forward = self.stage == "forward" and self.number is not None
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
        if not origins or origins[0] >= len(self.mode.seen):
            return
        seen = OpGraph(self.mode.seen).maker_of_error(self.mode.seen[origins[0]])
        pairs = zip(leaf_tensors(repeated), leaf_tensors(mixed), strict=True)
        for position, (with_error, without) in enumerate(pairs):
            if with_error.is_floating_point():
                eps = torch.sub(with_error, without).to(torch.bfloat16)
                self._keep(OutputError(seen, position, eps))

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

    def compare(
        self, results: Any, shadow: Any, repeated: Any, inside: set[int]
    ) -> OpRecord | None:
        """Measures results, sets their shadows, and returns the record if there is one.

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
            return None
        seen = self._new_record(first)
        is_measured = self.mode.is_wanted(self.location) and self.stage != "again"
        errors: list[tuple[torch.Tensor, float]] = []
        for position, (result, second, third) in enumerate(zip(low, high, same, strict=True)):
            if not (result.is_floating_point() or result.is_complex()):
                differs = self._compare_discrete(seen, result, second)
                errors += [(result, seen.accumulated_in)] if differs else []
                continue
            wide = self.shadows.widened(second)
            again = wide if second is third else third
            again = None if again is None else self.shadows.widened(again)
            is_counted = is_measured and not (position and self.facts.saves)
            error = 0.0
            if is_counted or self.shadows.is_low(result.dtype):
                error = self._measure(seen, position, result, wide, again, is_counted)
            errors.append((result, error))
            if _is_in(result, self.written) or address_of(result) in inside:
                continue
            if self.has_diverged or self.has_low or self.shadows.is_low(result.dtype):
                fresh = not _is_in(second, high[:position]) and not _shares(second, self.tensors)
                self.shadows.put(result, wide, is_fresh=fresh)
        if is_measured and self.stage == "forward" and self.facts.name in PRODUCTS:
            seen.integers = self._rounded_integers()
        is_recorded = is_measured and bool(seen.numel or seen.flips)
        if is_recorded:
            self.mode.record(seen)
        for result, error in errors:
            entry = self.shadows.note(result)
            entry.origin, entry.error = (seen.index if is_recorded else -1), error
        return seen if is_recorded else None

    def _rounded_integers(self) -> float:
        """Returns the largest of integers that a low input has rounded; 0 if there are none."""
        pairs = [(t, self.shadows.of(t)) for t in self.tensors if self.shadows.is_low(t.dtype)]
        return max((rounded_integers(low, exact) for low, exact in pairs), default=0.0)

    def _magnitude(self, shadow: Any) -> float:
        """Returns the size of a scalar; of a sum or mean, that without cancellation."""
        if self.facts.name in ("aten::mean", "aten::sum"):

            def absolute(tensor: torch.Tensor) -> torch.Tensor:
                return self.shadows.of(tensor).abs()

            shadow = self._repetition(absolute)(shadow)
        sizes = [abs(complex(t)) for t in leaf_tensors(shadow) if t.numel() == 1]
        return max(sizes, default=0.0)

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
    ) -> float:
        """Heals a result, adds its measures to the record, and returns its error."""
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
        if not is_counted:
            return found.accumulated
        exact = (self.shadows.of(t) for t in self.tensors)
        seen.is_origin |= not found.is_finite and not _has_infinity([*exact])
        seen.add(found)
        if seen.stage == "backward" and counts_zeros and found.numel:
            self.mode.exponents.append((exponents(shadow), found))
        if eps is not None and seen.stage == "forward" and found.local_sq:
            eps = eps if found.is_finite else torch.where(eps.isfinite(), eps, 0)
            output_error = OutputError(seen, position, eps.to(torch.bfloat16))
            if _is_in(result, self.written):
                output_error.is_written = True
                if result._is_view():
                    geometry = result.size(), result.stride(), result.storage_offset()
                    output_error.geometry = geometry
            self._keep(output_error)
        return found.accumulated

    def _keep(self, output_error: OutputError) -> None:
        """Keeps an error until its gradient arrives."""
        if self.number is not None:
            self.mode.output_errors.setdefault(self.number, []).append(output_error)

    def _new_record(self, result: torch.Tensor) -> OpRecord:
        entries = [self.shadows.entry(t) for t in self.tensors]
        known = [entry for entry in entries if entry is not None]
        return OpRecord(
            **self.location._asdict(),
            index=len(self.mode.seen),
            stage=self.stage,
            kernel=self.facts.name,
            dtype=dtype_name(self.rounded_to or result.dtype),
            recipe=self.recipe,
            shape=tuple(result.shape),
            accumulated_in=max((entry.error for entry in known), default=0.0),
            inputs=tuple(dict.fromkeys(e.origin for e in known if e.origin >= 0)),
        )


def _shapes(results: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in leaf_tensors(results)]


def _is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _shares(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(address_of(tensor) == address_of(other) for other in tensors)


def _has_infinity(tensors: list[torch.Tensor]) -> bool:
    """Returns True if any has an infinite element or a NaN."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    return any(not bool(t.isfinite().all()) for t in floats)


class ShadowMode(Recorder):  # type: ignore[no-untyped-call]
    """Runs a program together with its shadow."""

    def __init__(
        self,
        reference: torch.dtype,
        guard: StateGuard,
        paths: ModulePaths,
        modules: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(guard, paths)
        self.shadows = Shadows(reference)
        self.seen: list[OpRecord] = []
        self.exponents: list[tuple[torch.Tensor, Measures]] = []
        """Binary exponents of samples of low gradients, and the measures of these gradients."""
        self.not_examined: dict[tuple[str, str], str] = {}
        self.output_errors: dict[int, list[OutputError]] = {}
        """Errors by the number of the node of autograd whose gradients they meet."""
        self.roots: list[float] = []
        """The values in the reference of which the step calls ``backward``."""
        self.measured_nodes: set[int] = set()
        """Numbers of nodes of products in float8, each of which is measured as one op."""
        self.num_healed = 0
        self._modules = modules

    def run(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Runs an op, and repeats it if the reference may differ."""
        if not all(map(is_tracked, tensors)):
            return self.run_other(op, args, kwargs)
        facts = facts_of(op)
        if kwargs.get("beta") == 0:  # sums with products do not read their first argument then
            tensors = [tensor for tensor in tensors if tensor is not args[0]]
        if facts.is_view:
            results = op(*args, **kwargs)
            if _all_share(results, tensors):
                self.count_node()
                return results
        call = ShadowedCall(self, op, facts, args, kwargs, tensors)
        return call.run() if call.is_affected else call.run_once()

    def run_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that cannot be examined."""
        why = "it is not an op on plain tensors"
        self.leave_out(str(func), self.places.here("").module, why)
        return super().run_other(func, args, kwargs)

    def see_wrapped(self, tensor: torch.Tensor) -> None:
        """Lists a tensor subclass as not examined."""
        why = "the effect of ops on its inner tensors on the loss is unknown"
        self.leave_out(type(tensor).__name__, self.places.here("").module, why)

    def leave_out(self, op: str, module: str, why: str) -> None:
        """Lists an op as not examined."""
        self.not_examined.setdefault((op, module), why)

    def is_wanted(self, location: NodeLocation) -> bool:
        """Returns True if ops at a location are measured."""
        return self._modules is None or is_inside(location.module, self._modules)

    def magnitude_of(self, loss: torch.Tensor) -> float:
        """Returns the size of the loss in the reference, or of the scalars that it is a sum of."""
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
        """Adds the record of an op, unless a checkpoint repeats the op."""
        if seen.stage != "again":
            self.seen.append(seen)


def _all_share(results: Any, tensors: list[torch.Tensor]) -> bool:
    """Returns True if results share storages with inputs, as the schema of a view allows."""
    addresses = {address_of(t) for t in tensors}
    return all(address_of(t) in addresses for t in leaf_tensors(results))

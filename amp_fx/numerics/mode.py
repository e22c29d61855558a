"""Runs a program with a shadow in the reference precision underneath, op by op.

The mode stands below autograd and autocast: it sees casts, views, writes in place, and the
backward, in eager code of any kind. Each op that meets a low dtype runs up to three times: as the
program has it; on the same inputs in the reference, for its own error; and on the shadows, for the
error since the start. What cannot be run again is listed as not examined.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.dtypes import dtype_name
from amp_fx.numerics.measures import Measures, exponents, heal, measure_float
from amp_fx.numerics.places import CallNotes, Places, Site
from amp_fx.numerics.repeat import (
    OpFacts,
    below_everything,
    dropped_out,
    facts_of,
    in_reference,
    names_low_dtype,
    random_state,
)
from amp_fx.numerics.shadow import Shadows, is_tracked, widened
from amp_fx.numerics.torch_private import (
    address_of,
    latest_node_number,
    number_of,
    running_node,
)

if TYPE_CHECKING:
    from types import FrameType

    from amp_fx.numerics.state import StateGuard

aten = torch.ops.aten


@dataclasses.dataclass
class Seen:
    """One op that ran, as it is filled in.

    Attributes:
        index: Its number.
        stage: ``"forward"`` or ``"backward"``.
        site: Where it runs; in the backward where its forward ran.
        kernel: The op of the dispatcher.
        dtype: The dtype of its result.
        shape: The sizes of its first result.
        measures: Its numbers.
        error_in: The largest relative error of its inputs.
        inputs: Numbers of the ops that made them.
        effect: What its error does to the loss, to first order; None if that is not known.
        effect_sq: The squares of the same, element by element, summed up.
        is_origin: Whether the reference becomes infinite or NaN here.
        exponents: Binary exponents of a sample of the shadow, in a low backward.
    """

    index: int
    stage: str
    site: Site
    kernel: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    measures: Measures
    error_in: float = 0.0
    inputs: tuple[int, ...] = ()
    effect: float | None = None
    effect_sq: float = 0.0
    is_origin: bool = False
    exponents: torch.Tensor | None = None


@dataclasses.dataclass
class Rounding:
    """The error of one result of a forward op, kept until its gradient is there.

    Attributes:
        seen: The op that made the error.
        position: Which of the results.
        eps: The error.
        is_written: Whether the op has written it in place.
        geometry: Sizes, strides and offset where it was written to a view.
    """

    seen: Seen
    position: int
    eps: torch.Tensor
    is_written: bool = False
    geometry: tuple[Any, ...] | None = None

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the result, given that of the node; None where it is another's."""
        if self.geometry is not None and gradient.shape != self.eps.shape:
            is_whole = gradient.is_contiguous() and gradient.storage_offset() == 0
            return gradient.as_strided(*self.geometry) if is_whole else None
        return gradient if gradient.shape == self.eps.shape else None


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs everything under it with a shadow.

    Args:
        reference: The dtype of the reference.
        guard: Told of every write.
        modules: Patterns of modules; others are run, and not measured. None measures all.
        is_brief: Whether only results in a low dtype are measured.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        reference: torch.dtype,
        guard: StateGuard,
        modules: tuple[str, ...] | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows = Shadows(reference)
        self.notes = CallNotes()
        self.places = Places(self.notes)
        self.seen: list[Seen] = []
        self.not_examined: dict[tuple[str, str], str] = {}
        self.roundings: dict[int, list[Rounding]] = {}
        self.num_healed = 0
        self.is_paused = False
        self._guard = guard
        self._reference = reference
        self._modules = modules
        self._is_brief = is_brief
        self._site_of: dict[int, Site] = {}
        self._last_number = latest_node_number()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one op."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        self._guard.look_at(tensors)
        if not isinstance(func, torch._ops.OpOverload) or not all(map(is_tracked, tensors)):
            return self._unexamined(func, args, kwargs, "it is not an op on plain tensors")
        facts = facts_of(func)
        if facts.is_view:
            results = func(*args, **kwargs)
            if _all_share(results, tensors):
                self._count_node()
                return results
        self._guard.save(facts.written(args, kwargs))
        call = _Call(self, func, facts, args, kwargs, tensors)
        results = call.run() if call.is_touched() else call.run_as_it_is()
        self._guard.note_made(results, tensors)
        return results

    def _unexamined(self, func: Any, args: Any, kwargs: Any, why: str) -> Any:
        self.leave_out(str(func), self.places.here("").module, why)
        with torch._C.DisableTorchFunction():
            results = func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        self._guard.note_made(results, tensors)
        return results

    def leave_out(self, op: str, module: str, why: str) -> None:
        """Lists an op as not examined."""
        self.not_examined.setdefault((op, module), why)

    def is_wanted(self, site: Site) -> bool:
        """Whether ops of a site are measured."""
        from fnmatch import fnmatchcase

        if self._modules is None:
            return True
        return any(
            fnmatchcase(site.module, pattern) or fnmatchcase(site.module, f"{pattern}.*")
            for pattern in self._modules
        )

    def begin(self, kernel: str, tensors: list[torch.Tensor]) -> tuple[str, Site, int | None]:
        """Stage and site of an op that is about to be recorded, and the number of its node."""
        node = running_node()
        if node is not None and not torch.is_grad_enabled():
            site = self._site_of.get(number_of(node)) or Site(op=_node_name(node))
            return "backward", site, None
        number = latest_node_number()
        site = self.places.here(kernel)
        is_own = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if is_own or (not torch.is_grad_enabled() and number > self._last_number):
            self._site_of[number] = site  # a custom function makes its node before its forward
        self._count_node()
        is_again = node is not None and _is_in_checkpoint()
        return ("again" if is_again else "forward"), site, number if is_own else None

    def _count_node(self) -> None:
        self._last_number = latest_node_number()

    def site_of(self, number: int) -> Site:
        """The site of the op with some node of autograd."""
        return self._site_of.get(number, Site())

    def record(self, seen: Seen) -> None:
        """Adds the record of an op; what a checkpoint computes again was there before."""
        if seen.stage != "again":
            self.seen.append(seen)

    @property
    def reference(self) -> torch.dtype:
        """The dtype of the reference."""
        return self._reference

    @property
    def is_brief(self) -> bool:
        """Whether only results in a low dtype are measured."""
        return self._is_brief


class _Call:
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

    def is_touched(self) -> bool:
        """Whether the reference may have something else here."""
        if self.facts.is_empty:
            return False
        return self.has_diverged or self.has_low or self.names_low

    def run_as_it_is(self) -> Any:
        if torch.is_grad_enabled():
            self.mode._count_node()
        with torch._C.DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
        for result in _float_tensors(results):
            if result.numel():
                self._note_origin_of_infinity(result)
        return results

    def _note_origin_of_infinity(self, result: torch.Tensor) -> None:
        """Looks whether the reference, which runs the same here, becomes infinite."""
        if self.mode.is_brief or not self.tensors:
            return
        with below_everything():
            total = float(result.sum()) if not result.is_complex() else 0.0
            if total - total == 0 or _has_infinity(self.tensors):
                return
        stage, site, _ = self.mode.begin(self.facts.name, self.tensors)
        seen = self._new_record(stage, site, result)
        seen.is_origin = True
        seen.measures.max_abs = total
        self.mode.record(seen)

    def run(self) -> Any:
        """Runs the op, repeats it, and measures."""
        is_drawn = self.facts.is_random and (
            self.facts.name.endswith("_like")
            or not any(t.is_floating_point() for t in self.tensors if not _is_in(t, self.written))
        )
        stage, site, number = self.mode.begin(self.facts.name, self.tensors)
        inside = {address_of(t) for t in self.tensors}
        with below_everything():
            mixed = self._mixed_arguments() if stage == "forward" and number is not None else None
            before = self._states_before(mixed is not None) if not is_drawn else None
            rewind = self._rewinder() if self.facts.is_random and not is_drawn else None
        with torch._C.DisableTorchFunction():
            results = self.op(*self.args, **self.kwargs)
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
            self._compare(results, shadow, repeated, (stage, site, number), inside)
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
            if tensor.requires_grad:
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
        pairs = zip(_tensors(repeated), _tensors(mixed), strict=True)
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

    def _maker_of_error(self, seen: Seen) -> Seen:
        """The op that made the error of a constant, not the one that has passed it on."""
        while seen.inputs and seen.measures.local < seen.measures.accumulated / 2:
            above = [self.mode.seen[i] for i in seen.inputs if i < len(self.mode.seen)]
            if not above:
                break
            seen = max(above, key=lambda s: s.measures.accumulated)
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
        """Lets the shadow be what the low program has."""
        for tensor in [*_tensors(results), *self.written]:
            if self.shadows.has_diverged(tensor):
                self.shadows.put(tensor, widened(tensor, self.reference), is_fresh=False)

    def _compare(
        self,
        results: Any,
        shadow: Any,
        repeated: Any,
        place: tuple[str, Site, int | None],
        inside: set[int],
    ) -> None:
        stage, site, number = place
        low, high = _tensors(results), _tensors(shadow)
        same = _tensors(repeated) if repeated is not None else [None] * len(low)
        first = next((t for t in low if t.is_floating_point()), low[0] if low else None)
        if first is None:
            return
        seen = self._new_record(stage, site, first)
        is_measured = self.mode.is_wanted(site) and stage != "again"
        for position, (result, second, third) in enumerate(zip(low, high, same, strict=True)):
            is_written = _is_in(result, self.written)
            if not (result.is_floating_point() or result.is_complex()):
                self._compare_discrete(seen, result, second)
                continue
            wide = widened(second, self.reference)
            again = None if third is None else widened(third, self.reference)
            if second is third:
                again = wide
            if is_measured or self.shadows.is_low(result.dtype):
                self._measure(seen, position, result, wide, again, number, is_measured)
            entry = self.shadows.note(result)
            entry.origin, entry.error = seen.index, seen.measures.accumulated
            if is_written or address_of(result) in inside:
                continue
            if self.has_diverged or self.has_low or self.shadows.is_low(result.dtype):
                fresh = not _is_in(second, high[:position]) and not _shares(second, self.tensors)
                self.shadows.put(result, wide, is_fresh=fresh)
        if is_measured and (seen.measures.numel or seen.measures.flips):
            self.mode.record(seen)

    def _compare_discrete(self, seen: Seen, result: torch.Tensor, shadow: torch.Tensor) -> None:
        if result is shadow or torch.equal(result, shadow):
            self.shadows.forget(result)
            return
        seen.measures.flips += int(torch.count_nonzero(result != shadow))
        if not _is_in(result, self.written):
            self.shadows.put(result, shadow, is_fresh=True)

    def _measure(
        self,
        seen: Seen,
        position: int,
        result: torch.Tensor,
        shadow: torch.Tensor,
        repeated: torch.Tensor | None,
        number: int | None,
        is_measured: bool,
    ) -> None:
        is_low = self.shadows.is_low(result.dtype)
        counts_zeros = is_low and torch.finfo(result.dtype).smallest_normal > 1e-30
        found, eps = measure_float(
            result, repeated if is_low else None, shadow, counts_zeros=counts_zeros
        )
        if found.overflows > found.fills or found.poisoned:
            heal(result, repeated, shadow)
            self.mode.num_healed += 1
        if not is_measured:
            return
        is_finite = found.max_abs - found.max_abs == 0
        seen.is_origin |= not is_finite and not _has_infinity(
            [self.shadows.of(t) for t in self.tensors]
        )
        seen.measures.add(found)
        if seen.stage == "backward" and counts_zeros and found.numel:
            seen.exponents = exponents(shadow)
        if eps is None or number is None or seen.stage != "forward" or not found.local_sq:
            return
        if not found.is_finite:
            eps = torch.where(eps.isfinite(), eps, 0)
        kept = Rounding(seen, position, eps.to(torch.bfloat16))
        if _is_in(result, self.written):
            kept.is_written = True
            if result._is_view():
                kept.geometry = (result.size(), result.stride(), result.storage_offset())
        self.mode.roundings.setdefault(number, []).append(kept)

    def _new_record(self, stage: str, site: Site, result: torch.Tensor) -> Seen:
        entries = [self.shadows.entry(t) for t in self.tensors]
        known = [entry for entry in entries if entry is not None]
        return Seen(
            index=len(self.mode.seen),
            stage=stage,
            site=site,
            kernel=self.facts.name,
            dtype=result.dtype,
            shape=tuple(result.shape),
            measures=Measures(),
            error_in=max((entry.error for entry in known), default=0.0),
            inputs=tuple(dict.fromkeys(e.origin for e in known if e.origin >= 0)),
        )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _float_tensors(results: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(results) if t.is_floating_point()]


def _shapes(results: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(results)]


def _is_in(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _shares(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(address_of(tensor) == address_of(other) for other in tensors)


def _has_infinity(tensors: list[torch.Tensor]) -> bool:
    """Whether any has an infinite element or a NaN."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    return any(not bool(t.isfinite().all()) for t in floats)


def _all_share(results: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether results are views, as an op's schema says that they may be."""
    addresses = {address_of(t) for t in tensors}
    return all(address_of(t) in addresses for t in _tensors(results))


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint is running its forward again.

    Asked in a backward where gradients are recorded: that is so in a backward with a graph, too.
    Relies on ``torch.utils.checkpoint`` having one file.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _node_name(node: Any) -> str:
    return str(node.name()).removesuffix("Backward0")

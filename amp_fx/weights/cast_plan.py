"""The kept casts of one compiled graph: what it is called with, fresh."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from amp_fx.errors import StaleWeightError
from amp_fx.weights.device_sample import DeviceSample
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE, making_copies, same_bits
from amp_fx.weights.spread import spreading, with_parts
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing, is_written_by_replays, may_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from amp_fx.weights.kept_cast import Slot

log = logging.getLogger(__name__)

ADVICE = (
    "call amp_fx.weight_cache.invalidate() after such writes, or compile with "
    "options={'weight_cache': False}"
)


class Plan:
    """The kept casts of one compiled graph.

    Args:
        slots: What to pass, in the order of the graph's added inputs.
        owner: The name under which ``stats`` counts the copies.
        passed: Positions of the inputs that the graph takes besides the copies.
        is_pure: Whether nothing in the graph writes to a weight.
        verify: ``"sample"``, ``"full"`` or ``"off"``: how much of the copies each call compares
            with the weights.
        on_accelerator: Whether any weight is on a device that has streams.
        num_inputs: Number of inputs that Dynamo gives.
        specs: For the slots whose weights are DTensors, by position, how their copies lie.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        owner: str,
        passed: Sequence[int],
        is_pure: bool,
        verify: str,
        on_accelerator: bool = False,
        num_inputs: int = 0,
        specs: Mapping[int, Any] | None = None,
    ) -> None:
        self.specs = {len(passed) + i: spec for i, spec in (specs or {}).items()}
        self.spread = tuple(sorted({slots[i].source_index for i in specs or ()}))
        # Behind what Dynamo gives come the parts of DTensors: those are what is watched.
        parts = {index: num_inputs + i for i, index in enumerate(self.spread)}
        self.slots = tuple(
            dataclasses.replace(s, source_index=parts.get(s.source_index, s.source_index))
            for s in slots
        )
        self.owner = owner
        self.passed = tuple(passed)
        self.is_pure = is_pure
        self.verify = verify
        self.on_accelerator = on_accelerator
        self.devices: tuple[torch.device, ...] = ()
        self.look = self._new_look(self.slots, self.passed)
        self.device_sample: DeviceSample | None = None
        if on_accelerator and verify == "sample":
            self.device_sample = DeviceSample(self.slots)
        self._subset: tuple[tuple[Slot, ...], Any] = (), None

    def _new_look(self, slots: Sequence[Slot], passed: Sequence[int]) -> Any:
        sources = tuple(slot.source_index for slot in slots)
        return engine().Look(sources, tuple(passed), self.is_pure, self.verify == "sample")

    def of(self, slots: Sequence[Slot]) -> Plan:
        """The plan of a graph that takes the same inputs and other copies."""
        return Plan(
            slots,
            owner=self.owner,
            passed=self.passed,
            is_pure=self.is_pure,
            verify=self.verify,
        )

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs that Dynamo knows.

        Args:
            compiled: Takes the inputs that are passed, and the copies.
        """
        wrap = self._wrap_on_accelerator if self.on_accelerator else self._wrap
        return with_parts(self.spread, self.verifying(wrap(spreading(self.specs, compiled))))

    def verifying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that compares all copies first, where that was asked for."""
        return self._wrap_verified(call) if self.verify == "full" else call

    def _wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        enter, leave, prepare = self.look.enter, self.look.leave, self.prepare

        def call(*args: Any) -> Any:
            inputs = enter(args)
            if inputs is None:
                inputs = prepare(args)
            try:
                return compiled(*inputs)
            finally:
                leave()

        return call

    def _wrap_on_accelerator(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """With the order of streams, and captures that cast for themselves."""
        enter, leave, prepare = self.look.enter, self.look.leave, self.prepare
        indices = [slot.source_index for slot in self.slots]
        num_passed = len(self.passed)

        def call(*args: Any) -> Any:
            sources = [args[i] for i in indices]
            # Dynamo guards them: they are those of the first call.
            self.devices = devices = self.devices or accelerator_devices(sources)
            if is_capturing(devices):
                with making_copies():
                    inputs = self._cast(args)
                return compiled(*inputs)
            CACHE.streams.note(devices)
            self._read_sample()
            found = enter(args)
            inputs = prepare(args) if found is None else found
            try:
                CACHE.wait_for_refreshes(devices)
                CACHE.streams.hold(inputs[num_passed:])
                if found is not None and self.device_sample is not None:
                    self.device_sample.start(sources, inputs[num_passed:])
                return compiled(*inputs)
            finally:
                leave()

        return call

    def _read_sample(self) -> None:
        """Looks into what an earlier call's sample found, if anything."""
        suspects = None if self.device_sample is None else self.device_sample.read()
        if suspects is not None:
            self._investigate(suspects)

    def _wrap_verified(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_verified(*args: Any) -> Any:
            self._verify(args)
            return call(*args)

        return call_verified

    def prepare(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a call where something is stale or new; the call begins with it."""
        if self.look.found_mismatch:
            self._investigate([args[slot.source_index] for slot in self.slots])
        with CACHE.exclusive() as is_first, CACHE.moving(), making_copies():
            inputs = self._refreshed(args) if is_first else self._cast(args)
            self.look.begin()
            return inputs

    def _refreshed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs with kept copies, made again where they are stale."""
        if any(is_written_by_replays(args[slot.source_index]) for slot in self.slots):
            self.look.forget()  # it was known before a CUDA graph took a step
            return self._mixed(args, [self._copy_of(slot, args) for slot in self.slots])
        inputs = self._refresh(self.look, args)
        if inputs is not None:
            return inputs
        copies = self._remember(args)
        inputs = self._refresh(self.look, args)
        # None: some are not kept, or one weight lies at two places at once.
        return self._mixed(args, copies) if inputs is None else inputs

    def _remember(self, args: tuple[Any, ...]) -> list[Any]:
        """The copies for the slots, None where none is kept; the look knows them if all are."""
        copies = [self._copy_of(slot, args) for slot in self.slots]
        if all(copy is not None for copy in copies):
            self.look.remember(tuple(copies))
        return copies

    def _copy_of(self, slot: Slot, args: tuple[Any, ...]) -> Any:
        return CACHE.copy_of(slot, args[slot.source_index], self.owner)

    def _refresh(self, look: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        devices = self.devices
        found = look.refresh(args, may_watch(), CACHE.streams.are_several(devices))
        if found is None:
            return None
        inputs, num_made = found
        if num_made:
            CACHE.streams.record(devices)
        return inputs  # type: ignore[no-any-return]

    def _mixed(self, args: tuple[Any, ...], copies: Sequence[Any]) -> tuple[Any, ...]:
        """Inputs with casts for this call alone where no copy is kept."""
        kept = {s: c for s, c in zip(self.slots, copies, strict=True) if c is not None}
        slots = tuple(kept)
        if not slots:
            return self._cast(args)
        if self._subset[0] != slots:
            self._subset = slots, self._new_look(slots, ())
        look = self._subset[1]
        look.remember(tuple(kept.values()))
        lows = dict(zip(slots, self._refresh(look, args) or (), strict=False))
        return (
            *[args[i] for i in self.passed],
            *[lows[s] if s in lows else _cast_of(s, args[s.source_index]) for s in self.slots],
        )

    def _cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs with casts for this call alone."""
        lows = [_cast_of(slot, args[slot.source_index]) for slot in self.slots]
        return (*[args[i] for i in self.passed], *lows)

    def _investigate(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Finds the weights that were written unseen, says so once, and trusts them no more."""
        with CACHE.exclusive() as is_first, making_copies():
            if not is_first:
                return
            for slot, source in zip(self.slots, sources, strict=True):
                if source is None:  # it died since it was compared
                    continue
                copy = CACHE.copy_of(slot, source, self.owner)
                if copy is None or slot.is_alias or not copy.is_fresh(source):
                    continue
                if copy.is_suspect or not _is_equal(slot, source, copy.low):
                    copy.distrust()
                    warn_of_unseen_write(CACHE.described(slot, source))

    def _verify(self, args: tuple[Any, ...]) -> None:
        with CACHE.exclusive() as is_first, making_copies():
            if not is_first:
                return
            for slot in self.slots:
                source = args[slot.source_index]
                copy = CACHE.copy_of(slot, source, self.owner)
                if copy is None or slot.is_alias or not copy.is_fresh(source):
                    continue
                if not _is_equal(slot, source, copy.low):
                    raise StaleWeightError(
                        f"the kept {slot.dtype} copy of {CACHE.described(slot, source)} is "
                        f"stale: it was written where PyTorch cannot see it; {ADVICE}"
                    )


def _cast_of(slot: Slot, source: torch.Tensor) -> torch.Tensor:
    if slot.is_alias:
        return source.detach()
    return source.detach().to(slot.dtype, copy=True, memory_format=slot.memory_format)


def _is_equal(slot: Slot, source: torch.Tensor, low: torch.Tensor) -> bool:
    return same_bits(source.detach().to(slot.dtype), low)


def warn_of_unseen_write(weight: str) -> None:
    """Says that a weight was written where nothing sees it, and what that means."""
    log.warning(
        "%s was written where PyTorch cannot see it: through a NumPy array, a "
        "DLPack alias or a pointer that was taken before the latest call. From now on it is cast "
        "on every call; to keep its cast, %s",
        weight,
        ADVICE,
    )

"""Calls a compiled graph with fresh values computed from its weights.

The graph takes the values as inputs (``split``) or has them as constants of its code (``packed``).
Each call checks whether a weight was written since the values were computed, and recomputes those
that depend on it. Calls in progress continue with the values that they began with. One graph may
serve many layers: each set of weights has its own values.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from amp_fx.errors import StaleWeightError
from amp_fx.weights.engine import engine
from amp_fx.weights.sample import DeviceSample, Place, remember, remember_again
from amp_fx.weights.store import STORE, Entry, described, make, making_values, same_bits
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from amp_fx.weights.store import Wanted, Weights

    Args = tuple[Any, ...]
    Bind = Callable[[Sequence[Any]], Callable[[list[Any]], Any]]

log = logging.getLogger(__name__)

ADVICE = (
    "call amp_fx.weight_cache.invalidate() after such writes, or compile with "
    "options={'weight_cache': False}"
)


def flattened(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns values with tuples of tensors expanded in place."""
    return [t for v in values for t in (v if isinstance(v, tuple) else (v,))]


class CachedCall:
    """Compiled graph that is called with cached values.

    Args:
        specs: Describes the values.
        passed: Positions of the inputs that the graph takes besides.
        owner: Name under which ``stats`` counts the values.
        verify: ``"sample"``, ``"full"`` or ``"off"``: how much each call compares with the weights.
        compiled: Takes a list of the passed inputs and the values, tuples of values flattened; None
            if ``bind`` is given.
        bind: Returns code that has values as its constants.
    """

    _boxed_call = True  # it empties the list that it is called with

    def __init__(
        self,
        specs: Sequence[Wanted],
        passed: Sequence[int],
        *,
        owner: str,
        verify: str,
        compiled: Callable[[list[Any]], Any] | None = None,
        bind: Bind | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.passed = tuple(passed)
        self._positions = [spec.positions for spec in self.specs]
        self.owner = owner
        self.verify = verify
        self.devices: tuple[torch.device, ...] | None = None
        self._compiled = compiled
        self._bind = bind
        self._sample = DeviceSample()
        self._look = engine().Look(
            tuple(position for spec in self.specs for position in spec.positions),
            self.passed,
            bind is not None,
            verify == "sample",
        )
        self.leave, self.evict = self._look.leave, self._look.let_go
        weakref.finalize(self, STORE.when_quiet, STORE.drop_unused).atexit = False

    def __call__(self, given: list[Any]) -> Any:
        """Calls the graph.

        Raises:
            StaleWeightError: A weight was written unseen, with ``verify="full"``.
        """
        args = tuple(given)
        given.clear()
        run, inputs = self.enter(args) or self.prepare(args)
        try:
            code = self._compiled if run is None else run[0]
            assert code is not None
            return code(inputs)
        finally:
            self.leave()

    def adopt(
        self, values: Sequence[Any], started: Any, weights: Mapping[int, torch.Tensor]
    ) -> None:
        """Takes values that were made while the graph was compiled, on the CPU."""
        if accelerator_devices(weights.values()):
            return
        order = {position: i for i, position in enumerate(weights)}
        with STORE.exclusive(waits=False) as is_first, making_values():
            for spec, value in zip(self.specs, values, strict=True) if is_first else ():
                own = tuple(weights[i] for i in spec.positions)
                entry = self._entry(spec, own)
                if entry is not None:
                    STORE.adopt(entry, value, started, tuple(order[i] for i in spec.positions))

    def enter(self, args: Args) -> tuple[Any, list[Any]] | None:
        """Begins a call that finds all values fresh; None if it does not.

        Returns:
            What was bound, and the inputs of the graph.
        """
        if self.devices is None:  # Dynamo guards them: they are those of the first call
            self.devices = accelerator_devices(args[i] for s in self.specs for i in s.positions)
        if self.devices and is_capturing(self.devices):
            return None  # no Python runs in replays: what is captured makes its values itself
        if self.verify == "full":
            self._verify(args)
        if self.devices:
            return self._enter_on_accelerator(args, self.devices)
        return self._look.enter(args)  # type: ignore[no-any-return]

    def _enter_on_accelerator(
        self, args: Args, devices: tuple[torch.device, ...]
    ) -> tuple[Any, list[Any]] | None:
        """``enter`` where kernels run later, on streams that nothing orders by itself."""
        STORE.streams.note(devices)
        self._investigate(self._sample.read())
        found = self._look.enter(args)
        if found is None:
            return None
        try:
            STORE.wait_for_refreshes(devices)
            run, inputs = found  # another thread may have made values again since
            self._hold([*inputs[len(self.passed) :], *(() if run is None else run[1])])
            place = self._look.entries(args) if self.verify == "sample" else None
            if place is not None and place.is_due():
                with STORE.exclusive() as is_first:
                    if is_first:
                        STORE.streams.wait(devices)
                        self._sample.start(place)
        except BaseException:
            self.leave()
            raise
        return found  # type: ignore[no-any-return]

    def _hold(self, values: Sequence[Any]) -> None:
        """Keeps the memory of values until the current stream has read it."""
        STORE.streams.hold(flattened(values))

    def prepare(self, args: Args) -> tuple[Any, list[Any]]:
        """Computes stale and missing values, begins the call, and returns code and its inputs."""
        if self._look.found_mismatch:
            self._investigate(self._suspects(args))
        weights = [
            (args[p[0]],) if len(p) == 1 else tuple(args[i] for i in p) for p in self._positions
        ]
        devices = self.devices or ()
        with STORE.exclusive() as is_first, making_values():
            if not is_first or is_capturing(devices):
                values = [make(each, w) for each, w in zip(self.specs, weights, strict=True)]
                run = self._bound(values)
            else:
                STORE.streams.note(devices)
                STORE.streams.wait(devices)  # for what is fresh already
                try:
                    values, run = self._cached(args, weights)
                finally:
                    STORE.streams.record(devices)
            self._hold(values if devices else ())
            self._look.begin()
        inputs = [args[i] for i in self.passed]
        return run, inputs if self._bind is not None else [*inputs, *flattened(values)]

    def _cached(self, args: Args, weights: Sequence[Weights]) -> tuple[list[Any], Any]:
        """Returns all values, recomputed where they are stale, and what is bound to them."""
        known = self._look.entries(args)
        is_sampled = bool(self.devices) and self.verify == "sample"
        if known is not None and is_sampled and known.is_due():
            self._sample.start(known)  # of what is not recomputed now
        entries = known or [
            self._entry(spec, tensors) for spec, tensors in zip(self.specs, weights, strict=True)
        ]
        is_all = None not in entries
        pairs = [(e, w) for e, w in zip(entries, weights, strict=True) if e is not None]
        cached = [entry for entry, _ in pairs]
        STORE.refresh(cached, [tensors for _, tensors in pairs])
        if self.devices:  # another graph may sample
            (remember if self.verify == "sample" else remember_again)(cached)
        values = [
            make(spec, tensors) if entry is None else entry.kept.value
            for spec, entry, tensors in zip(self.specs, entries, weights, strict=True)
        ]
        STORE.fit(cached)
        run = self._bound(values)
        is_known = self._bind is None and self._look.entries(args) is not None
        if not is_known and is_all and all(entry.value is not None for entry in cached):
            place = known or Place(entries)
            self._look.remember(tuple(e.kept for e in place), place, run)
        return values, run

    def _bound(self, values: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """Binds values that are constants of code; returns the bound code and the values."""
        return None if self._bind is None else (self._bind(values), tuple(values))

    def _entry(self, spec: Wanted, weights: Weights) -> Entry | None:
        """Returns the entry of a value; None if its weights cannot be watched."""
        entry = STORE.entry(spec, weights, self.owner)
        if entry is not None:
            entry.calls.add(self)
        return entry

    def _suspects(self, args: Args) -> list[tuple[str, torch.Tensor]]:
        """The weights whose samples differ, by their names."""
        return [
            (name, args[position])
            for entry in self._look.entries(args) or ()
            for name, position, is_suspect in zip(
                entry.wanted.names, entry.wanted.positions, entry.kept.suspects(), strict=True
            )
            if is_suspect
        ]

    def _investigate(self, suspects: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Says once of each weight that it was written unseen, and trusts it no more."""
        for name, weight in suspects:
            if not engine().is_distrusted(weight):
                engine().distrust(weight)
                log.warning(
                    "%s was written where PyTorch cannot see it: through a NumPy array, a "
                    "DLPack alias or a pointer that was taken before the latest call. From now on, "
                    "values computed from it are made in every call. To keep them, %s",
                    described(name, self.owner, weight),
                    ADVICE,
                )

    def _verify(self, args: Args) -> None:
        with STORE.exclusive() as is_first, making_values():
            STORE.streams.wait(self.devices or ())
            for entry in (self._look.entries(args) if is_first else None) or ():
                wanted, weights = entry.wanted, tuple(args[i] for i in entry.wanted.positions)
                if wanted.is_alias or not entry.kept.is_fresh(weights):
                    continue
                if not same_bits(make(wanted, weights), entry.value):
                    made_of = ", ".join(wanted.names)
                    raise StaleWeightError(
                        f"the kept value of {described(made_of, self.owner, weights[0])} is "
                        f"stale: it was written where PyTorch cannot see it; {ADVICE}"
                    )

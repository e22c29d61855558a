"""Calls a compiled graph with fresh values computed from its weights.

The graph receives the values as inputs (``split``) or as constants of its code (``packed``). Each
call recomputes the values of weights that were written since their computation. Calls that are
already running continue with the old values. One graph may serve several layers; it then caches
values for each set of weights.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from amp_fx.errors import StaleWeightError
from amp_fx.weights.engine import engine
from amp_fx.weights.entry import CacheEntry, compute, computing_values, description, same_bits
from amp_fx.weights.store import STORE
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from amp_fx.weights.entry import ValueSpec, Weights

    Args = tuple[Any, ...]
    Bind = Callable[[Sequence[Any]], Callable[[list[Any]], Any]]

log = logging.getLogger(__name__)

ADVICE = (
    "call amp_fx.weight_cache.invalidate() after such writes, or compile with "
    "options={'weight_cache': False}"
)


def flattened(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns tensors, with each tuple replaced by its elements."""
    return [t for v in values for t in (v if isinstance(v, tuple) else (v,))]


class CachedCall:
    """Compiled graph that is called with cached values.

    Args:
        specs: Describes the values.
        passed: Positions of the inputs that are passed on to the graph.
        owner: Name under which ``stats`` counts the values.
        verify: ``"sample"``, ``"full"`` or ``"off"``; see ``amp_fx.keep``.
        compiled: Compiled graph. Receives a list of the passed inputs followed by the flattened
            values. None if ``bind`` is set.
        bind: Returns code with the values as its constants.
    """

    _boxed_call = True  # AOTAutograd passes a list, which the call clears

    def __init__(
        self,
        specs: Sequence[ValueSpec],
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
        self._cache = engine().GraphCache(
            tuple(position for spec in self.specs for position in spec.positions),
            self.passed,
            bind is not None,
            verify == "sample",
        )
        self.leave, self.evict = self._cache.leave, self._cache.evict
        weakref.finalize(self, STORE.run_when_unlocked, STORE.drop_unused).atexit = False

    def __call__(self, boxed_args: list[Any]) -> Any:
        """Calls the graph.

        Raises:
            StaleWeightError: With ``verify="full"``, a weight was written without a signal.
        """
        args = tuple(boxed_args)
        boxed_args.clear()
        bound, inputs = self.enter(args) or self.prepare(args)
        try:
            code = self._compiled if bound is None else bound[0]
            assert code is not None
            return code(inputs)
        finally:
            self.leave()

    def adopt(
        self, values: Sequence[Any], started: Any, weights: Mapping[int, torch.Tensor]
    ) -> None:
        """Stores values that were computed on the CPU while the graph was compiled."""
        if accelerator_devices(weights.values()):
            return
        order = {position: i for i, position in enumerate(weights)}
        with STORE.locked(waits=False) as is_outermost, computing_values():
            for spec, value in zip(self.specs, values, strict=True) if is_outermost else ():
                entry = self._entry(spec, tuple(weights[i] for i in spec.positions))
                if entry is not None:
                    STORE.adopt(entry, value, started, tuple(order[i] for i in spec.positions))

    def enter(self, args: Args) -> tuple[Any, list[Any]] | None:
        """Begins a call if all values are fresh.

        Returns:
            The result of ``_bound`` and the inputs of the graph; None if a value is stale.
        """
        if self.devices is None:  # Dynamo guards devices, so they never change
            self.devices = accelerator_devices(args[i] for s in self.specs for i in s.positions)
        if self.devices and is_capturing(self.devices):
            return None  # replays run no Python, so the captured graph must compute the values
        if self.verify == "full":
            self._verify(args)
        if self.devices:
            return self._enter_on_accelerator(args, self.devices)
        return self._cache.enter(args)  # type: ignore[no-any-return]

    def _enter_on_accelerator(
        self, args: Args, devices: tuple[torch.device, ...]
    ) -> tuple[Any, list[Any]] | None:
        """Implements ``enter`` for accelerators, where streams must be ordered."""
        call = self._cache.enter(args)
        if call is None:
            return None
        try:
            STORE.streams.note(devices)
            STORE.wait_for_refreshes(devices)
            code, inputs = call  # another thread may have refreshed values since
            self._hold([*inputs[len(self.passed) :], *(() if code is None else code[1])])
        except BaseException:
            self.leave()
            raise
        return call  # type: ignore[no-any-return]

    def _hold(self, values: Sequence[Any]) -> None:
        """Prevents reuse of the values' memory until the current streams have read it."""
        if STORE.streams.are_several():
            STORE.streams.hold(flattened(values))

    def prepare(self, args: Args) -> tuple[Any, list[Any]]:
        """Computes stale and missing values and begins the call.

        Returns:
            The result of ``_bound`` and the inputs of the graph.
        """
        if self._cache.found_mismatch:
            self._investigate(self._suspects(args))
        weights = [
            (args[p[0]],) if len(p) == 1 else tuple(args[i] for i in p) for p in self._positions
        ]
        devices = self.devices or ()
        with STORE.locked() as is_outermost, computing_values():
            if not is_outermost or is_capturing(devices):
                values = [compute(spec, w) for spec, w in zip(self.specs, weights, strict=True)]
                code = self._bound(values)
            else:
                STORE.streams.note(devices)
                STORE.streams.wait(devices)  # other streams may still compute fresh values
                try:
                    values, code = self._cached(args, weights)
                finally:
                    STORE.streams.record(devices)
            self._hold(values if devices else ())
            self._cache.begin()
        inputs = [args[i] for i in self.passed]
        return code, inputs if self._bind is not None else [*inputs, *flattened(values)]

    def _cached(self, args: Args, weights: Sequence[Weights]) -> tuple[list[Any], Any]:
        """Recomputes stale values; returns all values and the result of ``_bound`` for them."""
        remembered = self._cache.entries(args)
        entries = remembered or [
            self._entry(spec, tensors) for spec, tensors in zip(self.specs, weights, strict=True)
        ]
        has_all_entries = None not in entries
        pairs = [(e, w) for e, w in zip(entries, weights, strict=True) if e is not None]
        cached = [entry for entry, _ in pairs]
        STORE.refresh(cached, [tensors for _, tensors in pairs])
        values = [
            compute(spec, tensors) if entry is None else entry.slot.value
            for spec, entry, tensors in zip(self.specs, entries, weights, strict=True)
        ]
        STORE.enforce_limit(cached)
        code = self._bound(values)
        is_remembered = self._bind is None and self._cache.entries(args) is not None
        if (
            not is_remembered
            and has_all_entries
            and all(entry.value is not None for entry in cached)
        ):
            self._cache.remember(tuple(e.slot for e in cached), tuple(cached), code)
        return values, code

    def _bound(self, values: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """Returns code with the values as its constants, and the values; None without ``bind``."""
        return None if self._bind is None else (self._bind(values), tuple(values))

    def _entry(self, spec: ValueSpec, weights: Weights) -> CacheEntry | None:
        """Returns the entry of a value; None if its weights cannot be watched."""
        entry = STORE.entry(spec, weights, self.owner)
        if entry is not None:
            entry.calls.add(self)
        return entry

    def _suspects(self, args: Args) -> list[tuple[str, torch.Tensor]]:
        """Returns the names and tensors of weights whose samples differ."""
        return [
            (name, args[position])
            for entry in self._cache.entries(args) or ()
            for name, position, is_suspect in zip(
                entry.spec.names, entry.spec.positions, entry.slot.suspects(), strict=True
            )
            if is_suspect
        ]

    def _investigate(self, suspects: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Warns once about each weight that was written without a signal, and distrusts it."""
        for name, weight in suspects:
            if not engine().is_distrusted(weight):
                engine().distrust(weight)
                log.warning(
                    "%s was written where PyTorch cannot see it: through a NumPy array, a "
                    "DLPack alias or a pointer that was obtained before the latest call. From now "
                    "on, every call recomputes values that depend on it. To cache them, %s",
                    description(name, self.owner, weight),
                    ADVICE,
                )

    def _verify(self, args: Args) -> None:
        with STORE.locked() as is_outermost, computing_values():
            STORE.streams.wait(self.devices or ())
            for entry in (self._cache.entries(args) if is_outermost else None) or ():
                spec, weights = entry.spec, tuple(args[i] for i in entry.spec.positions)
                if spec.is_alias or not entry.slot.is_fresh(weights):
                    continue
                if not same_bits(compute(spec, weights), entry.value):
                    names = ", ".join(spec.names)
                    raise StaleWeightError(
                        f"the cached value of {description(names, self.owner, weights[0])} is "
                        "stale: a weight was written where PyTorch cannot see it; "
                        f"{ADVICE}"
                    )

"""Calls a compiled graph with fresh values computed from its weights.

The graph receives the values as inputs, and packed weights as constants of its code (``pack``).
Each call recomputes the values of weights that were written since their computation. Calls that are
already running continue with the old values. One graph may serve several layers; it then caches
values for each set of weights.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from amp_fx.errors import StaleWeightError
from amp_fx.weights.cache_entry import CacheEntry, compute, computing_values, description, same_bits
from amp_fx.weights.read_only import check_values, check_weights, copied, is_checking
from amp_fx.weights.store import STORE
from amp_fx.weights.streams import accelerator_devices
from amp_fx.weights.watch import engine
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from amp_fx.weights.cache_entry import ValueSpec, Weights

    Args = tuple[Any, ...]
    Bind = Callable[[Sequence[Any]], Callable[[list[Any]], Any]]

log = logging.getLogger(__name__)

ADVICE = (
    "call amp_fx.weight_cache.invalidate() after such writes, or compile with "
    "options={'weight_cache': False}"
)


VERIFY_ENVIRONMENT = "AMP_FX_VERIFY"

_VERIFY = {"1": "full", "full": "full", "sample": "sample", "off": "off"}


def verify_level(option: str) -> str:
    """Returns ``Options.verify``, unless the environment overrides it."""
    return _VERIFY.get(os.environ.get(VERIFY_ENVIRONMENT, ""), option)


def flattened(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns tensors, with each tuple replaced by its elements."""
    return [t for v in values for t in (v if isinstance(v, tuple) else (v,))]


class CachedCall:
    """Compiled graph that is called with cached values.

    Args:
        specs: Describes the values that are inputs.
        passed: Positions of the inputs that are passed on to the graph.
        owner: Name under which ``stats`` counts the values.
        verify: ``"sample"``, ``"full"`` or ``"off"``; see ``amp_fx.keep``.
        compiled: Compiled graph. Receives a list of the passed inputs followed by the flattened
            values. None for ``amp_fx.keep``, which only enters calls.
        constants: Describes the values that are constants of the code.
        bind: Returns ``compiled`` with values of ``constants``; None if there are none.
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
        constants: Sequence[ValueSpec] = (),
        bind: Bind | None = None,
    ) -> None:
        self.specs = (*constants, *specs)
        self.num_constants = len(constants)
        self.passed = tuple(passed)
        self._positions = [spec.positions for spec in self.specs]
        self.owner = owner
        self.verify = verify
        self.devices: tuple[torch.device, ...] | None = None
        self._compiled = compiled
        self._is_checked = is_checking()
        self._bind = bind
        self._cache = engine().GraphCache(
            tuple(position for spec in self.specs for position in spec.positions),
            self.passed,
            self.num_constants,
            verify == "sample",
        )
        self.leave, self.evict = self._cache.leave, self._cache.evict
        weakref.finalize(self, STORE.run_when_unlocked, STORE.drop_unused).atexit = False

    def __call__(self, boxed_args: list[Any]) -> Any:
        """Calls the graph.

        Raises:
            StaleWeightError: With ``verify="full"``, a weight was written without a signal. With
                ``AMP_FX_CHECK=1``, compiled code wrote to a cached value.
        """
        # The list is the only other reference to activations: clearing it lets the code free them.
        args = tuple(boxed_args)
        boxed_args.clear()
        bound, inputs = self.enter(args) or self.prepare(args)
        try:
            code = bound or self._compiled
            assert code is not None
            return self._checked(code, inputs, args) if self._is_checked else code(inputs)
        finally:
            self.leave()

    def _checked(self, code: Callable[[list[Any]], Any], inputs: list[Any], args: Args) -> Any:
        """Calls code, and checks that it writes neither to cached values nor to weights."""
        positions = dict(
            pair for s in self.specs for pair in zip(s.positions, s.names, strict=True)
        )
        check_values("code that ran since the latest call")
        with computing_values():
            copies = [copied(args[i]) for i in positions]
        result = code(inputs)
        check_values(f"the compiled code of {self.owner}")
        weights = [args[i] for i in positions]
        check_weights([*positions.values()], weights, copies, self.owner)
        return result

    def adopt(
        self, values: Sequence[Any], started: Any, weights: Mapping[int, torch.Tensor]
    ) -> None:
        """Stores values that were computed on the CPU while the graph was compiled."""
        # ``StreamOrder`` knows the streams of calls, not that of a compilation. On accelerators,
        # the first call computes the values again.
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
            The result of ``_bound`` and the inputs of the code; None if a value is stale.
        """
        if self.devices is None:  # Dynamo guards devices, so they never change
            self.devices = accelerator_devices(args[i] for s in self.specs for i in s.positions)
        if self.devices and is_capturing(self.devices):
            return None  # replays run no Python, so the captured graph must compute the values
        # Before the check of freshness: a write without a signal leaves values fresh.
        if self.verify == "full":
            self._verify(args)
        if self.devices:
            return self._enter_on_accelerator(args, self.devices)
        return self._cache.enter(args)

    def _enter_on_accelerator(
        self, args: Args, devices: tuple[torch.device, ...]
    ) -> tuple[Any, list[Any]] | None:
        """Implements ``enter`` for accelerators, where streams must be ordered."""
        call = self._cache.enter(args)
        if call is None:
            return None
        try:
            # The order of these steps matters: once the stream is noted, no refresh on another
            # stream reuses memory that this call reads.
            STORE.streams.note(devices)
            STORE.wait_for_refreshes(devices)
            _, inputs = call  # another thread may have refreshed values since
            self._hold(inputs[len(self.passed) :])  # constants exist on the CPU only
        except BaseException:
            self.leave()
            raise
        return call

    def _hold(self, values: Sequence[Any]) -> None:
        """Prevents reuse of the values' memory until the current streams have read it."""
        if STORE.streams.are_several():
            STORE.streams.hold(flattened(values))

    def prepare(self, args: Args) -> tuple[Any, list[Any]]:
        """Computes stale and missing values and begins the call.

        Returns:
            The result of ``_bound`` and the inputs of the code.
        """
        # Outside of the lock, because warnings run code of the user.
        if self._cache.found_mismatch:
            self._investigate(self._suspects(args))
        weights = [
            (args[p[0]],) if len(p) == 1 else tuple(args[i] for i in p) for p in self._positions
        ]
        devices = self.devices or ()
        with STORE.locked() as is_outermost, computing_values():
            # A captured CUDA graph must contain the computation, because its replays run no Python
            # that could compute values; an inner call must not change the store (``locked``).
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
            if devices:
                self._hold(values)
            # Under the lock: from here on, no refresh reuses the memory of these values.
            self._cache.begin()
        return code, [*(args[i] for i in self.passed), *flattened(values[self.num_constants :])]

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
        # After the refresh, because only then the bytes of new values are known.
        STORE.enforce_limit(cached)
        code = self._bound(values)
        is_remembered = self._bind is None and self._cache.entries(args) is not None
        # Only complete sets are remembered: the check in C++ has no way to compute a value.
        if (
            not is_remembered
            and has_all_entries
            and all(entry.value is not None for entry in cached)
        ):
            self._cache.remember(tuple(e.slot for e in cached), tuple(cached), code)
        return values, code

    def _bound(self, values: Sequence[Any]) -> Callable[[list[Any]], Any] | None:
        """Returns code with the first values as its constants; None if there are no constants."""
        return None if self._bind is None else self._bind(values[: self.num_constants])

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

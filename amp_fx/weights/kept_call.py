"""Calls a graph with values computed from its weights, all of them fresh.

A graph takes the values as inputs (casts of weights) or has them as constants of its code
(``freeze``). Each call checks whether any weight was written since the
values were made, and makes again those that depend on it. Calls under way go on with what they
began with. One graph may serve many layers: each set of weights has values of its own.
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
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from amp_fx.weights.store import Wanted, Weights

    Args = tuple[Any, ...]
    Bind = Callable[[Sequence[Any]], Callable[[list[Any]], Any]]

log = logging.getLogger(__name__)

ADVICE = (
    "call amp_fx.weight_cache.invalidate() after such writes, or compile with "
    "options={'weight_cache': False}"
)


class GaveUpError(Exception):
    """Keeping values does not pay here, or cannot be done: the other variant is to be called."""


class CannotKeepError(GaveUpError):
    """Values of these weights cannot be kept: the other variant is to be called for them."""


class Uses:
    """Counts whether values that are made again and again are used in between.

    Args:
        most_unused: How often in a row a value may be asked about that no call used in between.
    """

    def __init__(self, most_unused: int) -> None:
        self._most_unused = most_unused
        self._seen: weakref.WeakKeyDictionary[Entry, tuple[int, int]] = weakref.WeakKeyDictionary()

    def is_used(self, entry: Entry) -> bool:
        """Whether a value is worth making again; to be asked each time before that is done."""
        hits, num_unused = self._seen.get(entry, (-1, 0))
        now = entry.kept.hits
        num_unused = num_unused + 1 if hits == now else 0
        self._seen[entry] = now, num_unused
        return num_unused <= self._most_unused


MOST_UNUSED = 2
"""Updates in a row after which values that no second call used are kept no more."""


class KeptCall:
    """The kept values of one compiled graph.

    Args:
        wanted: The values; those that are inputs of the graph come first.
        passed: Positions of the inputs that the graph takes besides.
        owner: The name under which ``stats`` counts the values.
        verify: ``"sample"``, ``"full"`` or ``"off"``: how much each call compares with the weights.
        num_delivered: How many values are inputs; None for all.
        bind: Makes code of values that are constants; None if none are.
        may_give_up: Whether ``GaveUpError`` may be raised: there is another variant.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        passed: Sequence[int],
        *,
        owner: str,
        verify: str,
        num_delivered: int | None = None,
        bind: Bind | None = None,
        may_give_up: bool = False,
    ) -> None:
        self.wanted = tuple(wanted)
        self.passed = tuple(passed)
        self._positions = [each.positions for each in self.wanted]
        self.owner = owner
        self.verify = verify
        self.num_delivered = len(self.wanted) if num_delivered is None else num_delivered
        self.devices: tuple[torch.device, ...] | None = None
        self.may_give_up = may_give_up
        self._bind = bind
        self._uses = Uses(MOST_UNUSED)
        self._sample = DeviceSample()
        self._look = engine().Look(
            tuple(position for each in self.wanted for position in each.positions),
            self.passed,
            self.num_delivered,
            bind is not None,
            verify == "sample",
        )
        self.leave, self.let_go = self._look.leave, self._look.let_go
        weakref.finalize(self, STORE.when_quiet, STORE.drop_unused).atexit = False

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs that Dynamo knows."""

        def call(*args: Any) -> Any:
            _, inputs = self.enter(args) or self.prepare(args)
            try:
                return compiled(*inputs)
            finally:
                self.leave()

        return call

    def adopt(
        self, values: Sequence[Any], started: Any, weights: Mapping[int, torch.Tensor]
    ) -> None:
        """Takes values that were made while the graph was compiled, on the CPU."""
        if accelerator_devices(weights.values()):
            return
        order = {position: i for i, position in enumerate(weights)}
        with STORE.exclusive(waits=False) as is_first, making_values():
            for wanted, value in zip(self.wanted, values, strict=True) if is_first else ():
                own = tuple(weights[i] for i in wanted.positions)
                entry = self._entry(wanted, own)
                if entry is not None:
                    STORE.adopt(entry, value, started, tuple(order[i] for i in wanted.positions))

    def enter(self, args: Args) -> tuple[Any, list[Any]] | None:
        """Begins a call that finds all values fresh; None if it does not.

        Returns:
            What was bound, and the inputs of the graph.
        """
        if self.devices is None:  # Dynamo guards them: they are those of the first call
            self.devices = accelerator_devices(args[i] for w in self.wanted for i in w.positions)
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
        tensors = [t for v in values for t in (v if isinstance(v, tuple) else (v,))]
        STORE.streams.hold(tensors)

    def prepare(self, args: Args) -> tuple[Any, list[Any]]:
        """Makes stale and new values, begins the call, and returns what to call on which inputs.

        Raises:
            GaveUpError: The values cannot be kept, or keeping them does not pay.
        """
        if self._look.found_mismatch:
            self._investigate(self._suspects(args))
        weights = [
            (args[p[0]],) if len(p) == 1 else tuple(args[i] for i in p) for p in self._positions
        ]
        devices = self.devices or ()
        with STORE.exclusive() as is_first, making_values():
            if not is_first or is_capturing(devices):
                values = [make(each, w) for each, w in zip(self.wanted, weights, strict=True)]
                run = self._bound(values)
            else:
                STORE.streams.note(devices)
                STORE.streams.wait(devices)  # for what is fresh already
                try:
                    values, run = self._kept(args, weights)
                finally:
                    STORE.streams.record(devices)
            self._hold(values if devices else ())
            self._look.begin()
        return run, [*[args[i] for i in self.passed], *values[: self.num_delivered]]

    def _kept(self, args: Args, weights: Sequence[Weights]) -> tuple[list[Any], Any]:
        """All values, made again where they are stale, and what is bound to them."""
        known = self._look.entries(args)
        is_sampled = bool(self.devices) and self.verify == "sample"
        if known is not None and is_sampled and known.is_due():
            self._sample.start(known)  # of what is not made again now
        entries = known or [
            self._entry(each, tensors) for each, tensors in zip(self.wanted, weights, strict=True)
        ]
        is_all = None not in entries
        if not is_all and self._bind is not None and self.may_give_up:
            raise CannotKeepError
        kept = [entry for entry in entries if entry is not None]
        pairs = zip(entries, weights, strict=True)
        if not self._make_fresh(kept, weights if is_all else [w for e, w in pairs if e]):
            raise GaveUpError
        values = [
            make(each, tensors) if entry is None else entry.kept.value
            for each, entry, tensors in zip(self.wanted, entries, weights, strict=True)
        ]
        STORE.fit(kept)
        run = self._bound(values)
        is_known = self._bind is None and self._look.entries(args) is not None
        if not is_known and is_all and all(entry.value is not None for entry in kept):
            place = known or Place(entries)
            self._look.remember(tuple(e.kept for e in place), place, run)
        return values, run

    def _bound(self, values: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """Binds values that are constants of code; returns the bound code and the values."""
        return None if self._bind is None else (self._bind(values), tuple(values))

    def _entry(self, wanted: Wanted, weights: Weights) -> Entry | None:
        """The entry of a value; None if it cannot be kept."""
        entry = STORE.entry(wanted, weights, self.owner)
        if entry is not None:
            entry.calls.add(self)
        return entry

    def _make_fresh(self, entries: Sequence[Entry], weights: Sequence[Weights]) -> bool:
        """Makes stale values again; False, with all of them dropped, to give up."""
        is_used = self._uses.is_used if self.may_give_up else None
        try:
            if STORE.refresh(entries, weights, is_used):
                if self.devices:  # another graph may sample
                    (remember if self.verify == "sample" else remember_again)(entries)
                if STORE.may_fit(entries) or not self.may_give_up:
                    return True
        except Exception as error:
            if not self.may_give_up:
                raise
            log.debug("not kept: %s", error)
        for entry in entries:
            STORE.drop(entry)
        return False

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


class FrozenCall(KeptCall):
    """A frozen graph as the function that AOTAutograd calls.

    Args:
        handed_out: Positions of the outputs that are constants: callers may write to them.
        **settings: What else ``KeptCall`` takes.
    """

    _boxed_call = True  # it empties the list it is called with

    def __init__(self, *args: Any, handed_out: Sequence[int], **settings: Any) -> None:
        super().__init__(*args, num_delivered=0, **settings)
        self._handed_out = tuple(handed_out)

    def __call__(self, given: list[Any]) -> Any:
        """Calls the graph.

        Raises:
            GaveUpError: The other variant is to be called, with the same inputs.
            StaleWeightError: A weight was written unseen, with ``verify="full"``.
        """
        args = tuple(given)
        given.clear()
        run, inputs = self.enter(args) or self.prepare(args)
        try:
            outputs = run[0](inputs)
        finally:
            self.leave()
        if not self._handed_out:
            return outputs
        owned = list(outputs)
        for i in self._handed_out:
            owned[i] = owned[i].clone()
        return owned

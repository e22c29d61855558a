"""Calls a frozen graph on an accelerator: with the order of streams, and captures.

Values are made again on the stream of the call that found them stale, and never in place:
kernels of other calls, on other streams too, go on reading the old ones. A call on another
stream waits for the making, and keeps the memory of what it reads until it has read it.

What a user captures in a CUDA graph makes its values itself: each replay does so again, as it
has no Python that could look for writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.weights.cast_plan import warn_of_unseen_write
from amp_fx.weights.element_sample import ElementSample
from amp_fx.weights.frozen_call import FrozenCall
from amp_fx.weights.kept_copies import CACHE, described, making_copies
from amp_fx.weights.recipes import make
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from amp_fx.weights.freeze import FrozenGraph
    from amp_fx.weights.kept_values import Run, Values


class FrozenOnAccelerator(FrozenCall):
    """``FrozenCall`` for weights on a device that has streams.

    Args:
        graph: The frozen graph.
        names: Of the weights in the user's program, by position.
        verify: As for ``FrozenCall``; samples are taken by the device (``ElementSample``).
        **settings: What else ``FrozenCall`` takes.
    """

    samples_on_host = False

    def __init__(
        self, graph: FrozenGraph, names: Mapping[int, str], *, verify: str, **settings: Any
    ) -> None:
        super().__init__(graph, names, verify=verify, **settings)
        self.devices: tuple[torch.device, ...] = ()
        self.sample = ElementSample() if verify == "sample" else None

    def _call(self, args: tuple[Any, ...]) -> Any:
        # Dynamo guards the devices: they are those of the first call.
        self.devices = self.devices or accelerator_devices(args[i] for i in self.positions)
        if is_capturing(self.devices):
            return self._call_in_capture(args)
        CACHE.streams.note(self.devices)
        suspect = None if self.sample is None else self.sample.read()
        if suspect is not None:
            self._investigate(suspect)
        return super()._call(args)

    def _call_in_capture(self, args: tuple[Any, ...]) -> Any:
        weights = {i: args[i].detach() for i in self.positions}
        with making_copies():
            made = {name: make(recipe, weights) for name, recipe in self.graph.recipes.items()}
        run = self.graph.with_constants(made)
        return self._owned(run([args[i] for i in self.graph.taken]))

    def _made(self) -> None:
        CACHE.streams.record(self.devices)

    def _run(self, run: Run, inputs: list[Any], *, is_hit: bool) -> Any:
        CACHE.wait_for_refreshes(self.devices)
        CACHE.streams.hold(list(run.constants.values()))
        if is_hit and self.sample is not None and run.elements is not None:
            self.sample.begin(run.elements)
        return super()._run(run, inputs, is_hit=is_hit)

    def _elements_of(self, values: Values) -> Any:
        return None if self.sample is None else self.sample.elements_of(values.aliases)

    def _investigate(self, elements: Any) -> None:
        """Finds the weights that were written unseen, says so once, and trusts them no more."""
        with CACHE.exclusive() as is_first, making_copies():
            CACHE.streams.wait(self.devices)
            for values in list(self._values.values()) if is_first else ():
                run = values.run
                if run is None or run.elements is not elements:  # made again since
                    continue
                for position in elements.changed():
                    witness, weight = values.witnesses[position], values.sources[position]()
                    if weight is not None and witness.is_fresh(weight):
                        witness.distrust()
                        name = self.names[position]
                        warn_of_unseen_write(described(name, self.owner, weight))

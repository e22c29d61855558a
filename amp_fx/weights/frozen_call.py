"""Calls a frozen graph with constants that are fresh.

A frozen graph takes its weights no more, only what was made of them (``freeze``). Each call
looks whether any of them was written since, by the signals that kept casts rely on, and makes
again what depends on those that were (``kept_values``). Calls that are under way go on with
what they began with.

One graph may serve many layers (a block that is compiled by itself): each set of weights has
values of its own, and all share the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.errors import StaleWeightError
from amp_fx.weights.cast_plan import ADVICE, warn_of_unseen_write
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE, described, making_copies
from amp_fx.weights.kept_values import Values
from amp_fx.weights.recipes import sources_of
from amp_fx.weights.shared_values import num_bytes_of, others_of
from amp_fx.weights.variants import is_alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from amp_fx.weights.freeze import FrozenGraph
    from amp_fx.weights.kept_values import Run

MAX_UNUSED = 2
"""Times in a row that values are made again without a second call that takes them."""


class GaveUpError(Exception):
    """Keeping values does not pay here, or cannot be done: the other graph is to be called."""


class FrozenCall:
    """A frozen graph as the function that AOTAutograd calls.

    Args:
        graph: The frozen graph.
        names: Of the weights in the user's program, by position.
        owner: The name under which ``stats`` counts what is kept.
        is_pure: Whether nothing in the graph writes to a weight.
        verify: ``"sample"``, ``"full"`` or ``"off"``, as for kept casts.
        may_give_up: Whether there is another graph, for weights that change on every call.
    """

    _boxed_call = True  # it empties the list it is called with
    samples_on_host = True

    def __init__(
        self,
        graph: FrozenGraph,
        names: Mapping[int, str],
        *,
        owner: str,
        is_pure: bool,
        verify: str,
        may_give_up: bool,
    ) -> None:
        self.graph = graph
        self.names = names
        self.owner = owner
        self.verify = verify
        self.may_give_up = may_give_up
        self.positions = tuple(sorted(set().union(*map(sources_of, graph.recipes.values()))))
        self._num_taken = len(graph.taken)
        samples = verify == "sample" and self.samples_on_host
        self._look = engine().Look(self.positions, graph.taken, is_pure, samples)
        self._values: dict[int, Values] = {}  # by the identity of their first alias

    def __call__(self, given: list[Any]) -> Any:
        """Calls the graph.

        Args:
            given: The inputs of the graph, weights among them; emptied.

        Raises:
            GaveUpError: The other graph is to be called, with the same inputs.
            StaleWeightError: A weight was written unseen, with ``verify="full"``.
        """
        args = tuple(given)
        given.clear()
        return self._call(args)

    def _call(self, args: tuple[Any, ...]) -> Any:
        if self.verify == "full":
            self._verify(args)
        inputs = self._look.enter(args)
        run = None
        if inputs is not None:
            run = self._run_of(inputs)
            if run is None:  # dropped by another thread just now
                self._look.leave()
        is_hit = run is not None
        if run is None:
            run, inputs = self._prepare(args)
        try:
            return self._run(run, list(inputs[: self._num_taken]), is_hit=is_hit)
        finally:
            self._look.leave()

    def _run(self, run: Run, inputs: list[Any], *, is_hit: bool) -> Any:  # noqa: ARG002
        """Runs the graph; a hit found all fresh."""
        return self._owned(run.code(inputs))

    def _owned(self, outputs: Any) -> Any:
        """Outputs that a caller may write to."""
        if not self.graph.handed_out:
            return outputs
        owned = list(outputs)
        for i in self.graph.handed_out:
            owned[i] = owned[i].clone()
        return owned

    def _run_of(self, inputs: tuple[Any, ...]) -> Run | None:
        values = self._values.get(id(inputs[self._num_taken]))
        return None if values is None else values.run

    def _prepare(self, args: tuple[Any, ...]) -> tuple[Run, tuple[Any, ...]]:
        """What to run, with fresh values, and on what; the call begins with it."""
        weights = {i: args[i] for i in self.positions}
        with CACHE.exclusive() as is_first, CACHE.moving(), making_copies():
            values = self._values_of(weights) if is_first else None
            values = values or Values(self.graph, weights, self.names, self.owner)
            if self._look.found_mismatch:
                self._distrust(values)
            if is_first:
                self._refresh(values, weights)
            else:  # called in the midst of a change, by a signal handler or a finalizer
                values.refresh(weights)
            run = values.run
            assert run is not None
            run.elements = self._elements_of(values)
            self._made()
            self._look.begin()
        return run, tuple(args[i] for i in self.graph.taken)

    def _made(self) -> None:
        """Told that values were made, by one who keeps others out."""

    def _elements_of(self, values: Values) -> Any:  # noqa: ARG002
        """What samples compare of the weights that values were just made of."""
        return None

    def _values_of(self, weights: Mapping[int, torch.Tensor]) -> Values | None:
        for key, values in list(self._values.items()):
            if values.is_dropped:
                del self._values[key]
            elif values.is_of(weights):
                return values
        return None

    def _refresh(self, values: Values, weights: Mapping[int, torch.Tensor]) -> None:
        """Makes values again, and has them found.

        Raises:
            GaveUpError: They cannot be kept, or are not worth it.
        """
        self._values = {key: v for key, v in self._values.items() if v is not values}
        may_give_up = self.may_give_up and is_alone()  # the other may have to be compiled
        try:
            is_kept = values.refresh(weights, others_of(values)) and self._has_room(values)
        except Exception as error:
            values.drop()
            if not may_give_up:
                raise
            raise GaveUpError from error
        if may_give_up and (not is_kept or values.num_unused > MAX_UNUSED):
            values.drop()
            raise GaveUpError
        if is_kept:
            CACHE.values.add(values)
            self._values[id(values.aliases[self.positions[0]])] = values
            self._look.remember(tuple(values.witnesses[i] for i in self.positions))

    def _has_room(self, values: Values) -> bool:
        CACHE.values.discard(values)
        if CACHE.limit is None:
            return True
        others = others_of(values)
        return CACHE.make_room(num_bytes_of([values, *others]) - num_bytes_of(others))

    def _distrust(self, values: Values) -> None:
        for position, witness in values.witnesses.items():
            if witness.is_suspect and not witness.is_distrusted:
                witness.distrust()
                weight = values.sources[position]()
                warn_of_unseen_write(described(self.names[position], self.owner, weight))

    def _verify(self, args: tuple[Any, ...]) -> None:
        weights = {i: args[i] for i in self.positions}
        with CACHE.exclusive() as is_first, making_copies():
            values = self._values_of(weights) if is_first else None
            if values is None or not all(values.is_fresh(i, w) for i, w in weights.items()):
                return
            for name in values.unlike():
                made_of = ", ".join(self.names[i] for i in sources_of(self.graph.recipes[name]))
                raise StaleWeightError(
                    f"what is kept of {made_of} of {self.owner} is stale: it was written where "
                    f"PyTorch cannot see it; {ADVICE}"
                )

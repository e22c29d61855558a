"""What a frozen graph keeps of one set of weights: values computed from them alone.

Each weight has a witness, the engine's ``Copy`` over an alias of the weight's own bytes: it
tells whether any signal of ``write_signals`` told of a write since the values were made.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE, same_bits, watch, watch_swaps
from amp_fx.weights.recipes import key_of, make, ops_of, packing_key, sources_of
from amp_fx.weights.shared_values import Known, packed_alike
from amp_fx.weights.write_signals import install, is_watchable, is_written_by_replays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amp_fx.weights.freeze import FrozenGraph
    from amp_fx.weights.recipes import Recipe

    Weights = Mapping[int, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value that is kept, and made again when a weight that it is made of was written.

    Attributes:
        model: The class of the model (or the function) whose graph keeps it.
        weights: Names of the weights that it is made of.
        ops: Names of the ops that make it, in order; none for the weight itself.
        bytes: Bytes that it takes besides the weights; those of padding are not counted.
    """

    model: str
    weights: tuple[str, ...]
    ops: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(eq=False)
class Run:
    """A frozen graph with constants, which a call goes on with whatever is made meanwhile.

    Attributes:
        code: Takes a list of the inputs that the graph still has.
        constants: By name.
        elements: What samples compare, on accelerators.
    """

    code: Callable[[list[Any]], Any]
    constants: Mapping[str, torch.Tensor]
    elements: Any = None


class Values:
    """What a frozen graph keeps for one set of weights.

    Args:
        graph: The frozen graph.
        weights: By position among the inputs of the graph.
        names: Of the weights in the user's program, by position.
        owner: The name under which ``stats`` counts them.
    """

    def __init__(
        self, graph: FrozenGraph, weights: Weights, names: Mapping[int, str], owner: str
    ) -> None:
        self.graph = graph
        self.names = names
        self.owner = owner
        self._sources = {recipe: sources_of(recipe) for recipe in graph.recipes.values()}
        self.sources = {i: weakref.ref(weight) for i, weight in weights.items()}
        self.identities = {i: id(weight) for i, weight in weights.items()}
        self.ids = frozenset(self.identities.values())
        self._keys: dict[Recipe, str] = {}
        self._packing_keys: dict[Recipe, str] = {}
        self.aliases: dict[int, torch.Tensor] = {}
        self.witnesses: dict[int, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.num_made = 0
        self.num_unused = 0
        self.run: Run | None = None
        self.is_dropped = False
        self._hits = -1
        drop = functools.partial(_drop, weakref.ref(self))
        self._finalizers = [
            weakref.finalize(weight, CACHE.when_quiet, drop) for weight in weights.values()
        ]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    @property
    def hits(self) -> int:
        """Calls that found all of them fresh."""
        return max((witness.hits for witness in self.witnesses.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes that they take besides the weights."""
        return sum(value.bytes for value in self.by_identity().values())

    def is_of(self, weights: Weights) -> bool:
        """Whether they are made of these weights, wherever those lie now."""
        return all(self.sources[i]() is weight for i, weight in weights.items())

    def sources_of(self, recipe: Recipe) -> frozenset[int]:
        """Positions of the weights that a value of the graph is made of."""
        return self._sources[recipe]

    def key_of(self, recipe: Recipe) -> str:
        """The same in all graphs for what is made alike of the same weights."""
        if recipe not in self._keys:
            self._keys[recipe] = key_of(recipe, self.identities)
        return self._keys[recipe]

    def packing_key_of(self, recipe: Recipe) -> str:
        """The same for all that is packed of the same, whatever the packing was told."""
        if recipe not in self._packing_keys:
            self._packing_keys[recipe] = packing_key(recipe, self.identities)
        return self._packing_keys[recipe]

    def fresh_positions(self) -> frozenset[int]:
        """Positions of the weights that no signal told of a write to."""
        alive = ((i, source()) for i, source in self.sources.items())
        return frozenset(i for i, w in alive if w is not None and self.is_fresh(i, w))

    def refresh(self, weights: Weights, others: Sequence[Values] = ()) -> bool:
        """Makes again what is not fresh; False if that holds for this call alone.

        So it is where a weight cannot be watched.

        Args:
            weights: By position.
            others: What other graphs keep of them: what those have fresh is not made once more,
                and what they have stale is freed.
        """
        stale = {i for i, weight in weights.items() if not self.is_fresh(i, weight)}
        is_watched = [self._bind(i, weights[i]) for i in sorted(stale)]
        tickets = {i: self.witnesses[i].start(weights[i]) for i in stale}
        with torch.profiler.record_function("amp_fx::refresh"):
            made = self._made_of(stale, others)
        self._note_use()
        self.constants = {**self.constants, **made}
        for i, ticket in tickets.items():
            self.witnesses[i].finish(ticket)
        self.run = Run(self.graph.with_constants(self.constants), self.constants)
        for other in others:
            other.free_stale()
        return all(is_watched)

    def _made_of(self, stale: set[int], others: Sequence[Values]) -> dict[str, torch.Tensor]:
        wanted = {
            name: recipe
            for name, recipe in self.graph.recipes.items()
            if stale & self._sources[recipe] or name not in self.constants
        }
        known = Known(others)
        made: dict[Recipe, torch.Tensor] = {}
        for recipe in wanted.values():
            if recipe in made:
                continue
            found = known.get(self.key_of(recipe)) if self._is_trusted(recipe) else None
            if found is None:
                found = make(recipe, self.aliases)
                self.num_made += 1
                if self._is_trusted(recipe):
                    found = packed_alike(found, known.packed_of(self.packing_key_of(recipe)))
            made[recipe] = found
        return {name: made[recipe] for name, recipe in wanted.items()}

    def _is_trusted(self, recipe: Recipe) -> bool:
        """Whether no weight of a value was ever written unseen: others may not know of it."""
        return not any(self.witnesses[i].is_distrusted for i in self._sources[recipe])

    def free_stale(self) -> None:
        """Lets go of what is stale until it is made again; calls under way keep what they have."""
        fresh = self.fresh_positions()
        recipes = self.graph.recipes
        kept = {n: v for n, v in self.constants.items() if self._sources[recipes[n]] <= fresh}
        if len(kept) < len(self.constants):
            self.constants, self.run = kept, None

    def _note_use(self) -> None:
        """Counts how often in a row they were made again and no call took them."""
        is_unused = self.hits == self._hits
        self.num_unused = self.num_unused + 1 if is_unused else 0
        self._hits = self.hits

    def is_fresh(self, position: int, weight: torch.Tensor) -> bool:
        """Whether a weight lies where it did, and no signal told of a write."""
        witness = self.witnesses.get(position)
        if witness is None or not witness.lies_where(weight):
            return False
        return bool(witness.is_fresh(weight)) and not is_written_by_replays(weight)

    def _bind(self, position: int, weight: torch.Tensor) -> bool:
        """Has a weight watched where it lies now; False if it cannot be.

        Another thread may give it other data meanwhile: all that is noted here is of one place.
        """
        here = weight.detach()
        witness = self.witnesses.get(position)
        if witness is not None and witness.lies_where(here):
            return not is_written_by_replays(weight)
        is_watched = is_watchable(weight) and watch(here)
        if is_watched:
            install(weight.device)
            watch_swaps()
        self.aliases[position] = engine().alias(here)
        self.witnesses[position] = engine().Copy(self.aliases[position], here, False)
        return is_watched

    def unlike(self) -> Iterable[str]:
        """Names of the constants that would be others if they were made now."""
        for name, kept in self.constants.items():
            if not _is_same(make(self.graph.recipes[name], self.aliases), kept):
                yield name

    def by_identity(self) -> dict[int, KeptValue]:
        """What is kept, each value once; weights that are read as they are take no bytes."""
        shared = {alias.untyped_storage().data_ptr() for alias in self.aliases.values()}
        found = {}
        for name, value in self.constants.items():
            recipe = self.graph.recipes[name]
            weights = tuple(self.names[i] for i in sorted(self._sources[recipe]))
            num_bytes = _num_bytes(value, shared)
            found[id(value)] = KeptValue(self.owner, weights, ops_of(recipe), num_bytes)
        return found

    def invalidate(self, tensors: set[int] | None) -> None:
        """Has what is made of some weights made again.

        Args:
            tensors: Identities of the weights; None for all.
        """
        for position, source in self.sources.items():
            if position in self.witnesses and (tensors is None or id(source()) in tensors):
                self.witnesses[position].invalidate()

    def drop(self) -> None:
        """Frees all; no look finds them again."""
        for finalizer in self._finalizers:
            finalizer.detach()
        for witness in self.witnesses.values():
            witness.drop()
        self.sources, self.aliases, self.constants, self.run = {}, {}, {}, None
        self.is_dropped = True


def _drop(ref: weakref.ref[Values]) -> None:
    values = ref()
    if values is not None and not values.is_dropped:
        values.drop()


def _num_bytes(value: torch.Tensor, shared: set[int]) -> int:
    """Bytes that a value takes, those of weights left out; packed ones are not told exactly."""
    if value.layout is not torch.strided:
        return value.numel() * value.element_size()
    storage = value.untyped_storage()
    return 0 if storage.data_ptr() in shared else storage.nbytes()


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    return same_bits(left.contiguous(), right.contiguous())

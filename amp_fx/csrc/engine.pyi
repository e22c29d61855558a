"""Types of the C++ extension ``watch.cpp``, whose module is ``amp_fx_watch``."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Weights: TypeAlias = tuple[Tensor, ...]

class CacheSlot(Protocol):
    """A cached value, and the state of the weights that it was computed from."""

    value: Any
    @property
    def hits(self) -> int:
        """Number of calls that found the value fresh."""
    @property
    def made(self) -> int:
        """Number of computations."""
    def bind(self, weights: Weights, /) -> None:
        """Binds the slot to the weights' memory; the value is stale if that moved."""
    def matches(self, weights: Weights, /) -> bool:
        """Returns True if the slot is bound to the weights' memory."""
    def is_fresh(self, weights: Weights, /) -> bool:
        """Returns True if no signal indicates a write."""
    def invalidate(self) -> None:
        """Makes the value stale."""
    def suspects(self) -> list[bool]:
        """For each weight, True if a sampled element differed."""
    def adopt(self, other: CacheSlot, positions: tuple[int, ...], /) -> None:
        """Copies the states of the weights at these positions of a started slot."""

class GraphCache(Protocol):
    """The values of one compiled graph, for each set of weights that it was called with."""

    @property
    def found_mismatch(self) -> bool:
        """True if a sample differed in the latest call."""
    def enter(self, args: tuple[Any, ...], /) -> tuple[Any, list[Any]] | None:
        """Returns code and inputs, and begins the call, if all values are fresh; else None."""
    def begin(self) -> None:
        """Begins a call."""
    def leave(self) -> None:
        """Ends a call."""
    def entries(self, args: tuple[Any, ...], /) -> tuple[Any, ...] | None:
        """Returns the entries that ``remember`` got for these weights, or None."""
    def remember(
        self,
        slots: tuple[CacheSlot, ...],
        entries: tuple[Any, ...],
        code: Callable[..., Any] | None,
        /,
    ) -> None:
        """Adds the slots of a set of weights, and code that is bound to their values."""
    def evict(self) -> None:
        """Drops sets and code of evicted values."""

Slot: TypeAlias = CacheSlot
Slots: TypeAlias = tuple[CacheSlot, ...]
Cache: TypeAlias = GraphCache

class Engine(Protocol):
    """The module."""

    def CacheSlot(self, weights: Weights, is_alias: bool, /) -> Slot: ...  # noqa: N802
    def GraphCache(  # noqa: N802
        self,
        sources: tuple[int, ...],
        passed: tuple[int, ...],
        num_constants: int,
        samples: bool,
        /,
    ) -> Cache: ...
    def stale(self, slots: Slots, weights: tuple[Weights, ...], /) -> list[int]:
        """Returns positions of stale slots, without duplicates; counts a hit for each other."""
    def start(self, slots: Slots, weights: tuple[Weights, ...], /) -> None:
        """Call before values are computed."""
    def finish(self, slots: Slots, values: tuple[Any, ...], /) -> None:
        """Stores computed values."""
    def reusable(self, slots: Slots, /) -> list[Any]:
        """Returns each slot's value if nothing else reads its memory, else None."""
    def watch(self, tensor: Tensor, /) -> bool:
        """Watches a tensor's storage; returns False if that is impossible."""
    def is_foreign(self, tensor: Tensor, /) -> bool:
        """Returns True if torch did not allocate the memory."""
    def unwatch(self, tensor: Tensor, /) -> None:
        """Stops watching a tensor's storage."""
    def watched(self, tensor: Tensor, /) -> bool:
        """Returns True while the hook is set."""
    def distrust(self, tensor: Tensor, /) -> None:
        """Makes all values of a tensor permanently stale."""
    def is_distrusted(self, tensor: Tensor, /) -> bool:
        """Returns True after ``distrust``."""
    def mark(self, tensors: list[Tensor], /) -> None:
        """Records a write to each tensor."""
    def share_record(self, tensor: Tensor, part: Tensor, /) -> None:
        """Links a DTensor to its local tensor."""
    def alias(self, tensor: Tensor, /) -> Tensor:
        """Returns a tensor with the same memory and a separate storage."""
    def watch_list_ops(self) -> None:
        """Watches foreach and fused ops."""
    def watched_list_ops(self) -> list[str]:
        """Returns the names of the watched ops."""

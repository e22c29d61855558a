"""One value of the store, and the functions that compute and compare values."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from amp_fx.regions.state import no_autocast
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.watch import engine

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    Weights = tuple[torch.Tensor, ...]
    Key = tuple[Hashable, ...]


class ValueSpec(Protocol):
    """Description of a value that a graph or ``amp_fx.keep`` computes from weights."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the weights among the inputs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights in the user's program."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that compute the value, in order."""

    @property
    def is_alias(self) -> bool:
        """True if the value is an alias of the weight."""

    def key(self, weights: Weights) -> Hashable:
        """Returns a key; specs with equal keys compute equal values from the same weights."""

    def make(self, weights: Weights) -> Any:
        """Computes the value: a tensor or a tuple of tensors."""

    def cast_layout(self, weight: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Returns dtype and strides of the value if it is a cast of one weight, else None."""


class CacheEntry:
    """One value of the store.

    Attributes:
        key: Key in the store: the identities of the weights, and the key of the spec.
        slot: The value and the state of its weights (``CacheSlot`` in ``csrc/watch.cpp``).
        spec: Describes the value.
        owner: The model or function whose graph requested the value first.
        calls: The compiled graphs and ``keep`` objects that use the value.
        value_bytes: Bytes that the latest value takes in addition to the weights.
        is_cast: True if the value can be refreshed with one ``copy_`` of the weight.
        is_in_foreach_copy: True if ``_foreach_copy_`` refreshes the value with other casts.
        allocated: When the memory of ``slot.value`` was allocated (``StreamOrder.allocated``).
    """

    __slots__ = (
        "__weakref__",
        "allocated",
        "calls",
        "finalizers",
        "is_cast",
        "is_in_foreach_copy",
        "key",
        "owner",
        "slot",
        "spec",
        "value_bytes",
        "weight_refs",
    )

    def __init__(self, key: Key, slot: Any, spec: ValueSpec, weights: Weights, owner: str) -> None:
        self.key = key
        self.slot = slot
        self.spec = spec
        self.owner = owner
        self.value_bytes = 0
        self.is_cast = self.is_in_foreach_copy = False
        self.allocated = 0
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()  # of ``call.CachedCall``
        self.weight_refs = tuple(weakref.ref(weight) for weight in weights)
        self.finalizers: list[weakref.finalize[..., torch.Tensor]] = []

    @property
    def value(self) -> Any:
        """The value; None before its computation and after its eviction."""
        return self.slot.value

    @property
    def num_bytes(self) -> int:
        """Bytes that the value takes now in addition to the weights."""
        return 0 if self.slot.value is None else self.value_bytes

    def weights(self) -> Weights | None:
        """Returns the weights; None if one of them was freed."""
        alive = tuple(ref() for ref in self.weight_refs)
        return None if any(weight is None for weight in alive) else alive  # type: ignore[return-value]

    def is_of(self, weights: Weights) -> bool:
        """Returns True if ``weights`` are the entry's weights.

        The key does not tell, because identities of freed tensors are reused.
        """
        return all(ref() is w for ref, w in zip(self.weight_refs, weights, strict=True))

    def is_fresh(self) -> bool:
        """Returns True if the value reflects the weights: no signal indicates a write."""
        weights = self.weights()
        return weights is not None and bool(self.slot.is_fresh(weights))

    def set_value_bytes(self, value: Any, weights: Weights) -> None:
        """Computes ``value_bytes`` of a new value, without the padding of packed weights."""
        self.value_bytes = 0
        if self.spec.is_alias:
            return
        # Compares addresses: a Python object of a storage would count as another reader of it.
        addresses = {data_address(weight) for weight in weights if weight.numel()}
        for tensor in value if isinstance(value, tuple) else (value,):
            is_strided = tensor.layout is torch.strided
            if not is_strided or data_address(tensor) not in addresses:
                self.value_bytes += tensor.numel() * tensor.element_size()


def compute(spec: ValueSpec, weights: Weights) -> Any:
    """Computes a value from aliases of weights, so that reads do not count as writes."""
    # A kernel that requests a pointer to the weight's own storage would count as a write, and mark
    # the value as stale that it computes.
    if spec.is_alias:
        return read_only(weights[0])
    return spec.make(tuple(map(read_only, weights)))


def read_only(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight detached from autograd; for plain tensors, an alias of it."""
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return engine().alias(weight.detach()) if is_plain else weight.detach()


def copied_into(old: Any, new: Any) -> Any:
    """Copies a value into the memory of an older one and returns that.

    Returns ``new`` itself if the layouts differ.
    """
    olds, news = (x if isinstance(x, tuple) else (x,) for x in (old, new))
    if len(olds) != len(news) or not all(map(_have_equal_layouts, olds, news)):
        return new
    for target, source in zip(olds, news, strict=True):
        target.copy_(source)
    return old


def _have_equal_layouts(old: torch.Tensor, new: torch.Tensor) -> bool:
    is_strided = old.layout is new.layout is torch.strided
    if not is_strided or not torch.ops.aten.is_non_overlapping_and_dense.default(old):
        return False
    layouts = [(t.dtype, t.device, t.size(), t.stride()) for t in (old, new)]
    return layouts[0] == layouts[1]


def same_bits(left: Any, right: Any) -> bool:
    """Returns True if two tensors, or tuples of tensors, have the same bits, including NaN."""
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    if left.is_quantized:  # has no NaN; torch.equal compares the scales as well
        return bool(torch.equal(left, right))
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if (left.dtype, left.size()) != (right.dtype, right.size()):
        return False
    return bool(torch.equal(_bits(left), _bits(right)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.contiguous().view(_BITS[plain.dtype.itemsize])


_BITS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def description(name: str, owner: str, weight: torch.Tensor | None) -> str:
    """Describes a weight for a message; None represents a weight that was freed."""
    shape = () if weight is None else tuple(weight.shape)
    return f"{name} of {owner}, shape {shape},"


@contextlib.contextmanager
def computing_values() -> Iterator[None]:
    """Disables autograd, autocast and inference mode while values are computed."""
    with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
        yield

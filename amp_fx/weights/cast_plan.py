"""The kept casts of one compiled graph: what it is called with, and the quick way to know it."""

from __future__ import annotations

import dataclasses
import operator
import os
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import StaleWeightError
from amp_fx.regions.state import no_autocast
from amp_fx.tables.presets import torch_version
from amp_fx.weights.kept_copies import CACHE, same_bits, version_of, versions_of
from amp_fx.weights.storage_watch import arm, is_armed, storage_address_of
from amp_fx.weights.stream_order import accelerator_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.weights.kept_cast import Slot

VERIFY_ENVIRONMENT = "AMP_FX_VERIFY"


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """What a plan's weights were when their copies were last found fresh."""

    epoch: int
    versions: tuple[int, ...] | None
    lows: tuple[torch.Tensor, ...]


class Plan:
    """The kept casts of one compiled graph.

    Args:
        slots: What to pass, in the order of the graph's added inputs.
        owner: The name under which ``stats`` counts the copies: function and file.
        passed: Positions of the inputs that the graph takes besides the copies.
        writes_inputs: Whether the graph writes to any of its inputs.
        verify: Whether to compare every copy with a fresh cast on every call.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        owner: str,
        passed: Sequence[int],
        writes_inputs: bool,
        verify: bool,
    ) -> None:
        self.slots = tuple(slots)
        self.owner = owner
        self.passed = tuple(passed)
        self.verify = verify or os.environ.get(VERIFY_ENVIRONMENT) == "1"
        self.num_hits = 0
        self._select = _tuple_getter([slot.source_index for slot in slots])
        # A graph that writes to an input may write to a weight through shared storage.
        read = [] if writes_inputs else [s.source_index for s in slots if s.is_read]
        self._select_read = _tuple_getter(read)
        # By place: one graph may serve many layers, each with its own weights.
        self._snapshots: dict[Any, _Snapshot] = {}
        self._devices: tuple[torch.device, ...] = ()
        self._has_parts = False
        self._needs_layouts = not _guards_see_layouts()

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs that Dynamo knows."""
        select_passed = _tuple_getter(self.passed)

        def call(*args: Any) -> Any:
            lows = self.lows(args)
            read = [(tensor, version_of(tensor)) for tensor in self._select_read(args)]
            result = compiled(*select_passed(args), *lows)
            for tensor, version in read:
                # Kernels read inputs through a mutable pointer; this graph writes none.
                if not is_armed(tensor) and version_of(tensor) == version:
                    arm(tensor)
            return result

        return call

    def lows(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The copies for one call, fresh."""
        sources = self._select(args)
        if self._devices and torch.cuda.is_current_stream_capturing():
            # The user captures the call: a replay of it must cast for itself.
            return tuple(
                source.detach().to(slot.dtype)
                for slot, source in zip(self.slots, sources, strict=True)
            )
        snapshot = self._snapshots.get(self._place(sources))
        # The epoch comes last: a thread that notices a write raises it before it arms.
        if (
            snapshot is not None
            and all(map(is_armed, sources))
            and (snapshot.versions is None or versions_of(sources) == snapshot.versions)
            and snapshot.epoch == CACHE.watch.epoch
        ):
            self.num_hits += 1
            lows = snapshot.lows
        else:
            lows = CACHE.refresh(self, sources)
        if self._devices:
            CACHE.streams.wait(self._devices)
        if self.verify:
            self._verify(sources, lows)
        return lows

    def remember(self, sources: Sequence[torch.Tensor], lows: tuple[torch.Tensor, ...]) -> None:
        """Takes the quick way as long as these sources stay as they are."""
        self._devices = accelerator_devices(lows)
        self._has_parts = self._has_parts or any(map(_is_part, sources))
        if len(self._snapshots) >= _MAX_SNAPSHOTS:
            self._snapshots.clear()
        self._snapshots[self._place(sources)] = _Snapshot(
            epoch=CACHE.watch.epoch,
            # The replay of a captured optimizer step asks for no pointer, but raises versions.
            versions=versions_of(sources) if self._devices else None,
            lows=lows,
        )

    def _place(self, sources: Sequence[torch.Tensor]) -> Any:
        """Where weights lie: the addresses of their storages, and the offsets into them.

        Dynamo guards sizes and dtypes: a weight that fills its storage lies at its start.
        """
        offsets = tuple(map(_offset_of, sources)) if self._has_parts else ()
        layouts = tuple((s.size(), s.stride()) for s in sources) if self._needs_layouts else ()
        return tuple(map(storage_address_of, sources)), offsets, layouts

    def forget(self) -> None:
        """Looks at every weight again on the next call."""
        self._snapshots.clear()

    def _verify(self, sources: Sequence[torch.Tensor], lows: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), no_autocast():
            for slot, source, low in zip(self.slots, sources, lows, strict=True):
                if not same_bits(source.detach().to(slot.dtype), low):
                    raise StaleWeightError(
                        f"the kept {slot.dtype} copy of input {slot.source_index} of a graph of "
                        f"{self.owner}, shape {tuple(source.shape)}, is stale: it was written "
                        "where PyTorch cannot see it; call amp_fx.weight_cache.invalidate() "
                        "after such writes, or compile with options={'weight_cache': False}"
                    )


_MAX_SNAPSHOTS = 256


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is smaller than its storage."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


_offset_of: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset


def _guards_see_layouts() -> bool:
    """Whether Dynamo looks at the sizes and strides of a module's weights on every call.

    Before pytorch#177525 it takes a module whose dictionaries were not written for
    unchanged, so that a graph outlives ``weight.t_()``; torch 2.13 has it.
    """
    return torch_version() >= (2, 13)


def _tuple_getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """``itemgetter`` that gives a tuple for any number of indices."""
    if not indices:
        return lambda _: ()
    if len(indices) == 1:
        index = indices[0]
        return lambda items: (items[index],)
    return operator.itemgetter(*indices)

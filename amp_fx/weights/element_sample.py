"""Compares an element of each weight of a frozen graph, on accelerators, with what it was.

Kept casts are compared with their weights element by element (``device_sample``). What freezing
keeps lies otherwise than the weights that it is made of, so here one element of each weight is
remembered, on the device, when values are made, and another one every so many checks. The kernel
and the way of the answer to the host are those of ``device_sample``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from amp_fx.weights.device_sample import Device, DeviceSample
from amp_fx.weights.kept_copies import CACHE, making_copies

if TYPE_CHECKING:
    import random
    import weakref
    from collections.abc import Mapping

    from amp_fx.weights.device_sample import Tensors
    from amp_fx.weights.kept_copies import KeptCopy

MAX_CHECKS = 64
"""Checks of one choice of elements."""


class Elements:
    """An element of each of some weights, as it was.

    Args:
        weights: By position: their own bytes. Those that cannot be compared are left out.
        chance: Where places come from.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor], chance: random.Random) -> None:
        self._weights = {i: w for i, w in weights.items() if _is_comparable(w)}
        self._random = chance
        self.devices = {weight.device for weight in self._weights.values()}
        self.choose()

    def choose(self) -> None:
        """Remembers other elements, as they are now: one read for each dtype."""
        self.num_checks = 0
        self.now: dict[int, torch.Tensor] = {}
        self.then: dict[int, torch.Tensor] = {}
        alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for i, weight in self._weights.items():
            place = weight.storage_offset() + self._random.randrange(weight.numel())
            self.now[i] = weight.as_strided((), (), place)
            alike[weight.device, weight.dtype].append(i)
        for positions in alike.values():
            kept = torch.stack([self.now[i] for i in positions])
            if kept.dtype == torch.float64:  # the kernel compares with no wider one
                kept = kept.float()
            self.then.update(zip(positions, kept.unbind(), strict=True))

    def pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The elements of the weights themselves, and as they were."""
        return [self.now[i] for i in self.now], [self.then[i] for i in self.now]

    def changed(self) -> list[int]:
        """Positions of the weights whose elements are not what they were; waits for the device."""
        pairs = {i: (now.to(self.then[i].dtype), self.then[i]) for i, now in self.now.items()}
        return [
            i for i, pair in pairs.items() if not torch.allclose(*pair, 0.0, 0.0, equal_nan=True)
        ]


def _is_comparable(weight: torch.Tensor) -> bool:
    """Whether every place in a weight's memory holds an element of it, of a dtype that is known."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(weight)
    return bool(is_dense) and weight.dtype in _DTYPES and weight.numel() > 0


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ElementSample(DeviceSample):
    """The checks of one frozen graph, of whatever weights it is called with.

    Args:
        device: What there is of streams.
        has_kernel: Whether to use the Triton kernel, where there is one.
    """

    def __init__(self, device: Device | None = None, *, has_kernel: bool = True) -> None:
        super().__init__((), device, has_kernel=has_kernel)
        self._current: Elements | None = None
        self._of_check: Elements | None = None

    def elements_of(self, weights: Mapping[int, torch.Tensor]) -> Elements:
        """Chooses and remembers an element of each of some weights."""
        return Elements(weights, self._random)

    def begin(self, elements: Elements) -> None:
        """Queues a check of what a call found fresh, unless one is under way."""
        is_used_up = self._under_way is None and elements.num_checks >= MAX_CHECKS
        if is_used_up and not CACHE.streams.are_several(elements.devices):
            with making_copies():
                elements.choose()
            self.tables.clear()
        if elements.now:
            self._current = elements
            self.start(*elements.pairs())

    def read(self) -> Elements | None:  # type: ignore[override]
        """What the latest check was of, if any element in it had changed."""
        found = super().read()
        return None if found is None else self._of_check

    def _start(self, sources: Tensors, lows: Tensors) -> None:
        self._of_check = self._current
        if self._of_check is not None:
            self._of_check.num_checks += 1
        if CACHE.streams.are_several(low.device for low in lows):
            CACHE.streams.hold(lows)
        super()._start(sources, lows)

    def _kept(self, sources: Tensors) -> list[weakref.ref[KeptCopy] | None]:  # noqa: ARG002
        return []

    def _is_alias(self, position: int) -> bool:  # noqa: ARG002
        return False

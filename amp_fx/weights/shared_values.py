"""Lets the graphs of a model share what they keep: each batch size is a graph of its own.

A value is another graph's too if the same ops make it of the same weights, and that graph has it
fresh. Packing for oneDNN is told the size of the batch, and mostly packs alike for all: two packed
weights are one if they are made of the same, and oneDNN describes their memory alike.

Nothing is kept here: the tensors belong to the graphs, and go with the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.weights.kept_copies import CACHE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.weights.kept_values import Values
    from amp_fx.weights.recipes import Recipe


def others_of(values: Values) -> list[Values]:
    """What other graphs keep of some of the same weights, for one who keeps others out."""
    return [
        other
        for other in list(CACHE.values)
        if other is not values and not other.is_dropped and not other.ids.isdisjoint(values.ids)
    ]


class Known:
    """What other graphs have fresh, for one who keeps others out.

    Args:
        others: The graphs' values.
    """

    def __init__(self, others: Iterable[Values]) -> None:
        self._by_key: dict[str, torch.Tensor] = {}
        self._packed: dict[str, list[torch.Tensor]] = {}
        for other in others:
            fresh = other.fresh_positions()
            for name, value in other.constants.items():
                recipe = other.graph.recipes[name]
                if other.sources_of(recipe) <= fresh:
                    self._add(other, recipe, value)

    def _add(self, other: Values, recipe: Recipe, value: torch.Tensor) -> None:
        self._by_key[other.key_of(recipe)] = value
        if value.is_mkldnn:
            self._packed.setdefault(other.packing_key_of(recipe), []).append(value)

    def get(self, key: str) -> torch.Tensor | None:
        """What the same ops made of the same weights (``Values.key_of``)."""
        return self._by_key.get(key)

    def packed_of(self, key: str) -> Sequence[torch.Tensor]:
        """What was packed of the same (``Values.packing_key_of``), whatever packing was told."""
        return self._packed.get(key, ())


def packed_alike(value: torch.Tensor, known: Iterable[torch.Tensor]) -> torch.Tensor:
    """A packed weight, or the one among those known, packed of the same, that has its bytes."""
    for other in known if value.is_mkldnn else ():
        if _is_laid_out_alike(value, other):
            return other
    return value


def _is_laid_out_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether oneDNN describes the memory of two tensors alike, sizes and dtypes included.

    Relies on ``torch.ops.mkldnn._get_mkldnn_serialized_md``, which gives the descriptor's bytes.
    """
    describe = torch.ops.mkldnn._get_mkldnn_serialized_md
    return torch.equal(describe(left), describe(right))


def num_bytes_of(kept: Iterable[Values]) -> int:
    """Bytes of what several graphs keep, what they share counted once."""
    by_identity = {i: value.bytes for values in kept for i, value in values.by_identity().items()}
    return sum(by_identity.values())

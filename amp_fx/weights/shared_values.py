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
    from collections.abc import Iterable

    from amp_fx.weights.kept_values import Values


def others_of(values: Values) -> list[Values]:
    """What other graphs keep of some of the same weights, for one who keeps others out."""
    return [
        other
        for other in list(CACHE.values)
        if other is not values and not other.is_dropped and not other.ids.isdisjoint(values.ids)
    ]


def known_to(others: Iterable[Values]) -> dict[str, torch.Tensor]:
    """What others have fresh, by the keys of its recipes."""
    found: dict[str, torch.Tensor] = {}
    for other in others:
        fresh = other.fresh_positions()
        for name, value in other.constants.items():
            recipe = other.graph.recipes[name]
            if other.sources_of(recipe) <= fresh:
                found[other.key_of(recipe)] = value
    return found


def packed_by(others: Iterable[Values]) -> dict[str, list[torch.Tensor]]:
    """What others have fresh of packed weights, by what was packed."""
    found: dict[str, list[torch.Tensor]] = {}
    for other in others:
        fresh = other.fresh_positions()
        for name, value in other.constants.items():
            recipe = other.graph.recipes[name]
            if value.is_mkldnn and other.sources_of(recipe) <= fresh:
                found.setdefault(other.packing_key_of(recipe), []).append(value)
    return found


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

"""Weights that are parts of a larger tensor: with gaps between their elements, or expanded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS, NUM_COLUMNS = 70, 80


def whole_of() -> torch.Tensor:
    """Returns the larger tensor; its elements differ, and are as large as those of weights."""
    numbers = torch.arange(1.0, 1 + NUM_ROWS * NUM_COLUMNS) / (NUM_ROWS * NUM_COLUMNS)
    return numbers.view(NUM_ROWS, NUM_COLUMNS)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda big: big,
    "columns": lambda big: big[:, :40],
    "one_column": lambda big: big[:, 3:4],
    "every_second_row": lambda big: big[::2],
    "every_second_element": lambda big: big[1::3, ::2],
    "expanded": lambda big: big[2].expand(70, -1),
    "expanded_behind": lambda big: big[:, 1:2].expand(-1, 64),
    "transposed_part": lambda big: big[:7, :50].t(),
    "dimensions": lambda big: big.view(10, 7, 80)[::2, 1:6, 3:60:2],
    "channels_last": lambda big: big.view(2, 7, 80, 5).permute(0, 3, 1, 2),
    "one_element": lambda big: big[3, 3],
}


def read_by(kind: str) -> Any:
    """Returns which elements of the whole a weight has."""
    positions = torch.arange(NUM_ROWS * NUM_COLUMNS).view(NUM_ROWS, NUM_COLUMNS)
    return torch.isin(positions, STRIDED[kind](positions)).numpy()

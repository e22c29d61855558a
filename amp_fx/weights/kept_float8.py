"""A weight quantized to float8, which is kept: data and factors are made together, as one value."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.policies.float8 import float8_weight
from amp_fx.tables.float8 import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class Float8Slot:
    """One quantized weight of one graph; both added placeholders have it as their ``KEPT_INPUT``.

    Attributes:
        source_index: Position of the weight among the graph's inputs.
        recipe: A name of ``amp_fx.tables.float8.RECIPES``.
        has_rows_of_outputs: Whether the weight is ``[outputs, inputs]``.
        is_back: Whether it is for the gradient of the input.
        name: What the user's program calls the weight.
    """

    source_index: int
    recipe: str
    has_rows_of_outputs: bool
    is_back: bool
    name: str = "a weight"

    is_alias: ClassVar[bool] = False
    ops: ClassVar[tuple[str, ...]] = ("amp_fx.float8_weight",)
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the weight alone."""
        return (self.source_index,)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weight alone."""
        return (self.name,)

    @property
    def how(self) -> tuple[str, bool, bool]:
        """What ``float8_weight`` takes besides the weight."""
        return self.recipe, self.has_rows_of_outputs, self.is_back

    @property
    def is_by_row(self) -> bool:
        """Whether no scale depends on the whole weight."""
        recipe = RECIPES[self.recipe]
        return (recipe.weight_back if self.is_back else recipe.forward).is_by_row

    def key(self, weights: tuple[torch.Tensor, ...]) -> Hashable:  # noqa: ARG002
        """Equal for values that are alike."""
        return "float8", *self.how

    def make(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes the weight."""
        data, factors = float8_weight(weights[0], *self.how)
        return data, factors

    def laid_out(self, weight: torch.Tensor) -> None:
        """It is no cast."""


def unpacked(compiled: Callable[..., Any], slots: Sequence[Any]) -> Callable[..., Any]:
    """A compiled graph as a function that takes quantized weights as pairs, behind its inputs."""
    if not any(isinstance(slot, Float8Slot) for slot in slots):
        return compiled

    def call(*args: Any) -> Any:
        split = len(args) - len(slots)
        flat = list(args[:split])
        for value in args[split:]:
            flat += value if isinstance(value, tuple) else (value,)
        return compiled(*flat)

    return call

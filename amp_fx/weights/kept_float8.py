"""A weight quantized to float8, which is kept: data and factors are made together, as one value.

On GPUs, all that is quantized of one weight is made by one function that inductor compiles. In
eager code that would be ten kernels for each value, which write the weight's size in float32 four
times over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.policies.float8 import both_float8_weights, float8_weight
from amp_fx.tables.float8 import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    How = tuple[str, bool, bool]
    Quantized = tuple[torch.Tensor, How, tuple[torch.Tensor, torch.Tensor]]


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
    def how(self) -> How:
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

    def empty(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the quantized weight."""
        data, factors = (
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=weight.device)
            for x in float8_weight(torch.empty_like(weight, device="meta"), *self.how)
        )
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


def write(quantized: Sequence[Quantized]) -> None:
    """Quantizes weights; of each it takes what ``float8_weight`` takes besides, and the value."""
    for weight, how, value in quantized:
        _put(value, float8_weight(weight, *how))


def is_compiled(weight: torch.Tensor) -> bool:
    """Whether ``write_compiled`` is for a weight."""
    return weight.is_cuda and _has_triton()


def write_compiled(quantized: Sequence[Quantized]) -> None:
    """``write``, by one compiled function for all that is quantized of a weight."""
    by_weight = defaultdict(list)
    for each in quantized:
        by_weight[id(each[0])].append(each)
    for own in by_weight.values():
        weight = own[0][0]
        key = weight.dtype, weight.size(), weight.stride(), *(how for _, how, _ in own)
        _writer(key)(own)


@functools.cache
def _writer(_: Hashable) -> Callable[[Sequence[Quantized]], None]:
    """One for each key: Dynamo compiles few variants of one code object."""

    def own(quantized: Sequence[Quantized]) -> None:
        write_forms(quantized)

    own.__code__ = own.__code__.replace()
    return torch.compile(own, dynamic=False)


def write_forms(quantized: Sequence[Quantized]) -> None:
    """``write`` for the forms of one weight."""
    if len(quantized) != 2:
        return write(quantized)
    (weight, how, value), (_, other, back) = sorted(quantized, key=lambda each: each[1][2])
    if how[:2] != other[:2] or how == other:
        return write(quantized)
    news = both_float8_weights(weight, *how[:2])
    _put(value, news[0])
    return _put(back, news[1])


def _put(value: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    for target, source in zip(value, new, strict=True):
        target.copy_(source)


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()

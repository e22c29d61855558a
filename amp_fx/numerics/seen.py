"""What is noted of one op while a program runs under the shadow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from amp_fx.numerics.measures import Measures
    from amp_fx.numerics.places import Site


@dataclasses.dataclass
class Seen:
    """One op that ran, as it is filled in.

    Attributes:
        index: Its number.
        stage: ``"forward"`` or ``"backward"``.
        site: Where it runs; in the backward where its forward ran.
        kernel: The op of the dispatcher.
        dtype: The dtype of its result.
        shape: The sizes of its first result.
        measures: Its numbers.
        error_in: The largest relative error of its inputs.
        inputs: Numbers of the ops that made them.
        effect: What its error does to the loss, to first order; None if that is not known.
        effect_sq: The squares of the same, element by element, summed up.
        magnitude: How large a scalar of the reference is, or what it is the sum or mean of.
        is_origin: Whether the reference becomes infinite or NaN here.
        integers: The largest of integers that enter a product rounded; 0 where none do.
        exponents: Binary exponents of a sample of the shadow, in a low backward.
    """

    index: int
    stage: str
    site: Site
    kernel: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    measures: Measures
    error_in: float = 0.0
    inputs: tuple[int, ...] = ()
    effect: float | None = None
    effect_sq: float = 0.0
    magnitude: float = 0.0
    is_origin: bool = False
    integers: float = 0.0
    exponents: torch.Tensor | None = None


@dataclasses.dataclass
class Rounding:
    """The error of one result of a forward op, kept until its gradient is there.

    Attributes:
        seen: The op that made the error.
        position: Which of the results.
        eps: The error.
        is_written: Whether the op has written it in place.
        geometry: Sizes, strides and offset where it was written to a view.
    """

    seen: Seen
    position: int
    eps: torch.Tensor
    is_written: bool = False
    geometry: tuple[Any, ...] | None = None

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the result, given that of the node; None where it is another's."""
        if self.geometry is not None and gradient.shape != self.eps.shape:
            is_whole = gradient.is_contiguous() and gradient.storage_offset() == 0
            return gradient.as_strided(*self.geometry) if is_whole else None
        return gradient if gradient.shape == self.eps.shape else None

"""Finds tensors that differ in bits, and by how much."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from amp_fx.numerics.measures import relative

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that is not equal in every bit.

    Attributes:
        what: The tensor: ``"output 0"``, ``"gradient of lin.weight"``.
        elements: The number of elements that differ.
        size: The number of all elements.
        max_abs: The largest absolute difference; infinite if one side alone is not finite.
        ulps: The same in units of the last place; None if the dtype is not a real one.
        note: Another difference: in dtype, shape or the sign of zeros; else empty.
    """

    what: str
    elements: int
    size: int
    max_abs: float
    ulps: int | None
    note: str = ""

    def __str__(self) -> str:
        """Returns one line."""
        if self.note:
            return f"{self.what}: {self.note}"
        ulps = "" if self.ulps is None else f" ({self.ulps} ulps)"
        return (
            f"{self.what}: {self.elements} of {self.size} elements differ, by at most "
            f"{self.max_abs:.3g}{ulps}"
        )


def differences(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> tuple[Difference, ...]:
    """Returns the tensors that differ, in order; NaN equals NaN, 0.0 differs from -0.0."""
    found = []
    for what in dict.fromkeys((*expected, *actual)):
        if what not in expected or what not in actual:
            side = "eager code" if what in expected else "the compiled program"
            found.append(Difference(what, 0, 0, math.inf, None, f"only {side} has it"))
            continue
        difference = compare(what, expected[what], actual[what])
        found += [difference] if difference else []
    return tuple(found)


def compare(what: str, expected: torch.Tensor, actual: torch.Tensor) -> Difference | None:
    """Returns the difference of two tensors; None if dtype, shape and bits are equal."""
    size = expected.numel()
    if expected.dtype != actual.dtype:
        note = f"{actual.dtype} instead of {expected.dtype}"
        return Difference(what, size, size, math.inf, None, note)
    if expected.shape != actual.shape:
        note = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return Difference(what, size, size, math.inf, None, note)
    is_other = (expected != actual) & ~(expected.isnan() & actual.isnan())
    if not is_other.any() and expected.is_floating_point() and expected.dtype.itemsize > 1:
        zeros = (expected == 0) & (expected.signbit() != actual.signbit())
        flipped = int(zeros.sum())
        note = f"{flipped} of {size} elements are zeros of the other sign"
        return Difference(what, flipped, size, 0.0, 0, note) if flipped else None
    elements = int(is_other.sum())
    if not elements:
        return None
    ours, theirs = (side[is_other].detach() for side in (actual, expected))
    wide = torch.complex128 if ours.is_complex() else torch.float64
    max_abs = float((ours.to(wide) - theirs.to(wide)).abs().nan_to_num(math.inf).max())
    ulps = None
    if ours.is_floating_point() and ours.dtype.itemsize in _INTEGERS:
        ulps = int((_ordered(ours) - _ordered(theirs)).abs().max())
    return Difference(what, elements, size, max_abs, ulps)


def relative_error(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Returns the relative difference (L2) of tensors; infinite if one side alone is not finite.

    Args:
        pairs: Each expected tensor with the actual one.
    """
    error_sq = size_sq = 0.0
    for expected, actual in pairs:
        one = expected.detach().double()
        other = actual.detach().to(one)
        is_same = (one == other) | (one.isnan() & other.isnan())
        error_sq += float(torch.where(is_same, 0.0, one - other).square().sum())
        size_sq += float(torch.where(one.isfinite(), one, 0.0).square().sum())
    found = relative(error_sq, size_sq)
    return found if math.isfinite(found) else math.inf


def _ordered(value: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of floating-point numbers, without gaps."""
    bits = value.contiguous().view(_INTEGERS[value.dtype.itemsize]).to(torch.int64)
    least = -(1 << (8 * value.dtype.itemsize - 1))
    return torch.where(bits < 0, least - bits, bits)

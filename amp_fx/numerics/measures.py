"""Measures of one result: its error, its range, overflows and elements flushed to zero."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass
class Measures:
    """Sums over the elements of one result; sums of several results add up.

    Attributes:
        numel: Elements.
        local_sq: Squares of the op's own error, against the op in the reference on the same inputs.
        local_ref_sq: Squares of the result of that op.
        error_sq: Squares of the error against the reference program.
        shadow_sq: Squares of the result of the reference program.
        max_abs: The largest absolute value of the reference program; NaN if it has a NaN.
        overflows: Elements that are infinite or NaN while the op in the reference on the same
            inputs is finite, and elements that a cast to float8 reduced to the dtype's limit.
        fills: Overflows of one large negative number, as in a mask.
        inherited: Elements that are infinite or NaN because the inputs are, or because the op in
            the reference on the same inputs is; in the reference program they are finite.
        poisoned: NaNs among ``inherited``.
        singular: ``inherited`` elements of finite inputs: the logarithm of a flushed number.
        flushed: Elements that are zero while the op in the reference on the same inputs is not.
        nonzero: Elements of the op in the reference that are not zero.
        flips: Elements of a discrete result that differ.
    """

    numel: int = 0
    local_sq: float = 0.0
    local_ref_sq: float = 0.0
    error_sq: float = 0.0
    shadow_sq: float = 0.0
    max_abs: float = 0.0
    overflows: int = 0
    fills: int = 0
    inherited: int = 0
    poisoned: int = 0
    singular: int = 0
    flushed: int = 0
    nonzero: int = 0
    flips: int = 0

    def add(self, other: Measures) -> None:
        """Adds the measures of another result."""
        for field in dataclasses.fields(Measures):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            is_maximum = field.name == "max_abs"
            joined = _largest(ours, theirs) if is_maximum else ours + theirs
            setattr(self, field.name, joined)

    @property
    def is_finite(self) -> bool:
        """True if the result of the reference program is finite."""
        return math.isfinite(self.max_abs)

    @property
    def local(self) -> float:
        """The relative error (L2) of the op itself."""
        return relative(self.local_sq, self.local_ref_sq)

    @property
    def accumulated(self) -> float:
        """The relative error (L2) against the reference program."""
        return relative(self.error_sq, self.shadow_sq)


def relative(error_sq: float, reference_sq: float) -> float:
    """Returns the ratio of two norms, given their squares; infinite if only the second is zero."""
    if error_sq == 0:
        return 0.0
    return math.sqrt(error_sq / reference_sq) if reference_sq else math.inf


def _largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


class Readings:
    """Numbers on a device. The host reads each at once, or all together at the end.

    Args:
        is_batched: True to read at the end, so that no op waits for the device. Overflows are
            found too late to be healed then, and ``is_sound`` becomes False.
    """

    def __init__(self, *, is_batched: bool) -> None:
        self.is_batched, self.is_sound = is_batched, True
        self._pending: list[tuple[torch.Tensor | None, Callable[[list[float]], None]]] = []

    def add(self, numbers: Sequence[torch.Tensor], then: Callable[[list[float]], None]) -> None:
        """Calls a function with numbers, after the functions of earlier numbers."""
        packed = torch.stack([n.to(torch.float64) for n in numbers]) if numbers else None
        self._pending.append((packed, then))
        if not self.is_batched:
            self.read()

    def read(self) -> None:
        """Reads the numbers, with one transfer."""
        pending, self._pending = self._pending, []
        packed = [tensor for tensor, _ in pending if tensor is not None]
        whole = torch.cat([tensor.to(packed[0].device) for tensor in packed]) if packed else None
        values = iter([] if whole is None else whole.tolist())
        for tensor, then in pending:
            then([next(values) for _ in range(0 if tensor is None else tensor.numel())])


def measure_float(
    readings: Readings,
    result: torch.Tensor,
    repeated: torch.Tensor | None,
    shadow: torch.Tensor,
    *,
    counts_zeros: bool,
) -> tuple[Measures, torch.Tensor | None]:
    """Measures a floating-point result, with one transfer from the device.

    Args:
        readings: It reads the numbers, at once or later.
        result: The result of the op in the program.
        repeated: The result of the op in the reference on the same inputs; None if it ran so.
        shadow: The result in the reference program.
        counts_zeros: True to count zeros, for dtypes with a small range.

    Returns:
        The measures, and the error of the op itself, element by element.
    """
    found, given = Measures(result.numel()), result.dtype
    if not result.numel():
        return found, None
    if result.is_complex():
        parts = [None if t is None else torch.view_as_real(t) for t in (result, repeated, shadow)]
        result, repeated, shadow = parts  # type: ignore[assignment]
    wide = result.to(shadow.dtype)  # arithmetic on two dtypes takes five times as long
    eps = None if repeated is None else torch.sub(wide, repeated)
    error = torch.sub(wide, shadow) if eps is None or repeated is not shadow else eps
    low, high = torch.aminmax(shadow)
    numbers = {"low": low, "high": high, "error_sq": _square(error), "shadow_sq": _square(shadow)}
    if eps is not None and repeated is not None:
        is_same = error is eps
        numbers["local_sq"] = numbers["error_sq"] if is_same else _square(eps)
        numbers["local_ref_sq"] = numbers["shadow_sq"] if is_same else _square(repeated)
    if counts_zeros and repeated is not None:
        numbers["flushed"] = ((repeated != 0) & (result == 0)).sum()
        numbers["nonzero"] = torch.count_nonzero(repeated)
    if given in _SATURATING and repeated is not None:
        numbers["overflows"] = (repeated.abs() > _SATURATING[given]).sum()
    names = [*numbers]
    again = None if readings.is_batched else (result, repeated, shadow)

    def fill(read: list[float]) -> None:
        values = dict(zip(names, read, strict=True))
        found.max_abs = _largest(abs(values.pop("low")), abs(values.pop("high")))
        saturated = values.pop("overflows", None)
        for name, value in values.items():
            setattr(found, name, type(getattr(found, name))(value))  # counts are integers
        if not _is_sound(found):
            readings.is_sound = False
            if again is not None:
                _measure_again(found, *again)
        if saturated is not None:
            found.overflows = int(saturated)

    readings.add([*numbers.values()], fill)
    return found, eps


_SATURATING = {torch.float8_e4m3fn: 464.0}
"""The largest numbers that round to the limit of dtypes whose casts saturate."""


def _is_sound(found: Measures) -> bool:
    """Returns True if sums of squares neither overflowed nor underflowed."""
    sums = (found.error_sq, found.shadow_sq, found.local_sq, found.local_ref_sq)
    return all(map(math.isfinite, sums)) and (found.max_abs == 0 or found.shadow_sq > 1e-30)


def _measure_again(
    found: Measures, result: torch.Tensor, repeated: torch.Tensor | None, shadow: torch.Tensor
) -> None:
    """Measures finite elements in float64, and counts the others."""
    result, shadow = result.double(), shadow.double()
    bad = ~result.isfinite()
    inherited, poisoned = bad & shadow.isfinite(), result.isnan() & ~shadow.isnan()
    found.error_sq, found.shadow_sq = _finite_squares(result, shadow)
    if repeated is not None:
        repeated = repeated.double()
        inherited, poisoned = inherited & ~repeated.isfinite(), poisoned & repeated.isnan()
        found.overflows = int((bad & repeated.isfinite()).sum())
        found.fills = _num_fills(result, repeated) if found.overflows else 0
        found.local_sq, found.local_ref_sq = _finite_squares(result, repeated)
    found.inherited, found.poisoned = int(inherited.sum()), int(poisoned.sum())


def _finite_squares(result: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Returns the sums of squares of the error and of the reference, where both are finite."""
    both = result.isfinite() & reference.isfinite()
    low, exact = result[both], reference[both]
    return float((low - exact).square().sum()), float(exact.square().sum())


def _num_fills(result: torch.Tensor, repeated: torch.Tensor) -> int:
    """Returns the number of overflows, if all of them are one large negative number."""
    over = repeated[~result.isfinite() & repeated.isfinite()]
    is_one = bool((over == over[0]).all()) and float(over[0]) <= -1e4
    return int(over.numel()) if is_one else 0


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares."""
    flat = dense(tensor)
    return torch.dot(flat, flat)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all elements as one dimension, in any order, without a copy if possible."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def heal(
    result: torch.Tensor, repeated: torch.Tensor | None, shadow: torch.Tensor, *, is_singular: bool
) -> None:
    """Replaces overflows in a result by the largest numbers of the dtype.

    Later overflows can then be found in the same run. Elements that the op in the reference makes
    infinite too, such as those of a mask, do not change. NaNs that a mask causes, and singular
    elements of finite inputs, are replaced by those of the reference program.
    """
    limit = torch.finfo(result.dtype).max
    wide = result.to(shadow.dtype)  # few ops take float8
    if repeated is not None:
        bad = ~wide.isfinite() & repeated.isfinite()
        wide = torch.where(bad, repeated.clamp(-limit, limit), wide)
    bad = wide.isnan() & ~shadow.isnan()
    if is_singular:
        bad |= ~wide.isfinite() & shadow.isfinite()
    result.copy_(torch.where(bad, shadow.clamp(-limit, limit), wide))


def add_effect(
    readings: Readings,
    gradient: torch.Tensor,
    shadow: torch.Tensor,
    eps: torch.Tensor,
    add: Callable[[float, float], None],
) -> None:
    """Computes the effect of an error on the loss, to first order, and the sum of squares.

    The gradient is the mean of those in the low and in the reference program, which makes the
    second order vanish.

    Args:
        readings: It reads the numbers, at once or later.
        gradient: The gradient of the result in the low program.
        shadow: The gradient in the reference program.
        eps: The error of the result.
        add: Gets the effect and the sum of squares if they are finite.
    """
    eps = eps.to(shadow.dtype)
    moved = gradient.to(shadow.dtype) + shadow if gradient is not shadow else shadow * 2
    moved *= eps
    again = (shadow, eps) if gradient is not shadow and not readings.is_batched else None

    def fill(read: list[float]) -> None:
        effect, square = read
        if math.isfinite(effect) and math.isfinite(square):  # an overflow has no first order
            add(effect / 2, square / 4)
        elif again is not None and not math.isfinite(effect):
            add_effect(readings, again[0], *again, add)
        else:
            readings.is_sound = False

    readings.add([moved.sum(), _square(moved)], fill)

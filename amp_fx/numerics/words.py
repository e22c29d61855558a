"""What is said of numbers: the sentences of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from amp_fx.numerics.records import OpRecord


def number(value: float) -> str:
    """A number with two digits: ``1.2e-04``, ``0.12``, ``3.4``."""
    if value == 0 or value != value or abs(value) == float("inf"):
        return f"{value:.0f}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    return f"{value:.1e}"


def share(value: float) -> str:
    """A share in per cent, with a sign of its own where it is none: ``1.2 %``."""
    return f"{100 * value:.3g} %"


def limit_of(dtype: str) -> float:
    """The largest number of a dtype."""
    return float(torch.finfo(getattr(torch, dtype)).max)


def overflow_words(record: OpRecord) -> str:
    """How much of a result overflowed."""
    part = f"{record.overflows} of {record.numel} elements overflow"
    limit = limit_of(record.dtype)
    if record.max_abs > limit and record.max_abs != float("inf"):
        return f"{part}: |x| is up to {number(record.max_abs)}, the limit is {limit:.6g}"
    return part


def flush_words(record: OpRecord) -> str:
    """How much of a result was flushed to zero."""
    return f"{share(record.underflow)} of its elements are flushed to zero"


def sentence_on(record: OpRecord) -> str:
    """What was measured of an op."""
    parts = [f"its own error is {number(record.local)}" if record.local else "makes no error"]
    if record.accumulated:
        parts.append(f"that since the start {number(record.accumulated)}")
    if record.effect:
        parts.append(f"it moves the loss by {number(record.effect)}")
    if record.overflows:
        parts.append(overflow_words(record))
    if record.flushed:
        parts.append(flush_words(record))
    if record.flips:
        parts.append(f"{record.flips} discrete elements differ")
    return "; ".join(parts)

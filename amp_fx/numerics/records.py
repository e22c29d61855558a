"""The records of a report, which a run fills in, and words for them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from amp_fx.numerics.measures import Measures

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    K = TypeVar("K", bound=Hashable)
    T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns lists of items with equal keys, in the order of the first ones."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclasses.dataclass
class OutputError:
    """The error of one result of a forward op, kept until the gradient of the result arrives.

    Attributes:
        record: The op that made the error.
        position: The position of the result among the op's results.
        eps: The error.
        is_written: True if the op wrote the result in place.
        geometry: Sizes, strides and offset if it wrote to a view.
    """

    record: OpRecord
    position: int
    eps: torch.Tensor
    is_written: bool = False
    geometry: tuple[Any, ...] | None = None

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the part of the node's gradient for this result; None if it has none."""
        if self.geometry is not None and gradient.shape != self.eps.shape:
            is_whole = gradient.is_contiguous() and gradient.storage_offset() == 0
            return gradient.as_strided(*self.geometry) if is_whole else None
        return gradient if gradient.shape == self.eps.shape else None


UNIT = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""The largest relative error of one rounding, by dtype."""


@dataclasses.dataclass
class OpRecord(Measures):
    """One op of the dispatcher that ran, with its measures.

    Attributes:
        index: Its number, in the order in which ops ran.
        stage: ``"forward"`` or ``"backward"``.
        module: The path of the innermost module around it, in the backward that of its forward.
        module_type: That module's class.
        op: What a policy calls it (``"linear"``); ``""`` where no policy reaches it.
        kernel: The op itself: ``"aten::addmm"``.
        dtype: The dtype of its result; of a product in float8 that of its operands.
        shape: The sizes of its result.
        file: Source file of the line that calls it, or ``""``.
        line: The line's number, or 0.
        code: The line's text.
        inputs: Numbers of the ops that made its inputs.
        accumulated_in: The largest relative error of its inputs.
        effect: What its own error does to the loss, to first order; None where that is unknown.
        effect_sq: The squares of the same, element by element, summed up.
        magnitude: How large a scalar of the reference is, or what it is the sum or mean of.
        is_origin: Whether the reference program becomes infinite or NaN here.
        integers: The largest of integers that enter a product rounded; 0 where none do.
        recipe: That of a product in float8 (``"rowwise"``); else empty.
    """

    computed = (
        *("local", "accumulated", "effect_rms", "norm", "amplification", "underflow", "headroom"),
        "sqnr",
    )
    omitted = ("local_sq", "local_ref_sq", "error_sq", "shadow_sq", "effect_sq")

    index: int = 0
    stage: str = "forward"
    module: str = ""
    module_type: str = ""
    op: str = ""
    kernel: str = ""
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    file: str = ""
    line: int = 0
    code: str = ""
    inputs: tuple[int, ...] = ()
    accumulated_in: float = 0.0
    effect: float | None = None
    effect_sq: float = 0.0
    magnitude: float = 0.0
    is_origin: bool = False
    integers: float = 0.0
    recipe: str = ""

    @property
    def effect_rms(self) -> float:
        """The effect on the loss if the signs of the errors were by chance."""
        return math.sqrt(self.effect_sq)

    @property
    def norm(self) -> float:
        """The norm (L2) of the result in the reference program."""
        return math.sqrt(self.shadow_sq)

    @property
    def sqnr(self) -> float:
        """The signal-to-noise ratio of the op itself, in decibels."""
        return -20 * math.log10(self.local) if self.local > 0 else math.inf

    @property
    def amplification(self) -> float:
        """The ratio of the error to that of the inputs, or to one rounding."""
        unit = UNIT.get(self.dtype, UNIT["float32"])
        return self.accumulated / max(self.accumulated_in, unit)

    @property
    def underflow(self) -> float:
        """The share of elements that became zero, of those that are none in the reference."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def headroom(self) -> float:
        """Powers of two between the largest value and the dtype's limit; negative beyond it.

        Scales bring the operands of a product in float8 to the limit, whatever their values.
        """
        limit = math.inf
        if self.is_float and not self.recipe:
            limit = limit_of(self.dtype)
        if self.max_abs == 0 or not math.isfinite(limit):
            return math.inf
        return math.log2(limit / self.max_abs) if math.isfinite(self.max_abs) else -math.inf

    @property
    def result_dtype(self) -> str:
        """The dtype of its result."""
        return "bfloat16" if self.recipe else self.dtype

    @property
    def is_float(self) -> bool:
        """True if its result is of floating-point numbers."""
        return bool(getattr(torch, self.dtype).is_floating_point)

    @property
    def name(self) -> str:
        """Unique in a report: ``"forward_12"``."""
        return f"{self.stage}_{self.index}"

    @property
    def is_overflow(self) -> bool:
        """True if something becomes infinite or NaN here, other than a mask."""
        return self.overflows > self.fills or self.singular > 0

    @property
    def label(self) -> str:
        """The name of the op in a policy, else its own."""
        return self.op or self.kernel.removeprefix("aten::")

    @property
    def reason(self) -> str:
        """Describes what was measured."""
        return sentence_on(self)


@dataclasses.dataclass(frozen=True)
class GradientRecord:
    """The gradient of one leaf: a parameter, or an input that requires one.

    Attributes:
        name: The parameter's path; ``"input 0"`` for others.
        shape: Its sizes.
        error: Relative error (L2) against the reference program.
        cosine: Of the angle between both.
        norm: Its norm (L2) there. What is zero but for rounding, as the gradient of the bias of
            attention's keys, has errors as large as itself, and they do no harm.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    cosine: float
    norm: float


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Ops of one kind in one place that do harm.

    Attributes:
        kind: ``"overflow"``, ``"underflow"``, ``"local error"``, ``"cancellation"``,
            ``"growth"`` (of errors, over several ops of a module), ``"integers"`` (which a
            product takes rounded, such as positions) or ``"effect"``.
        module: The path of the module; ``*`` stands for the numbers of several alike.
        op: The op to mend, as a policy calls it; by its own name where no policy reaches it.
        stage: ``"forward"`` or ``"backward"``.
        dtype: What it runs in.
        file: Source file of the line that calls it, or ``""``.
        line: The line's number, or 0.
        code: The line's text.
        why: A sentence that says what it does.
        score: How far over the threshold it is: 1 is at it.
        members: Numbers of the ops (``OpRecord.index``).
        is_mendable: Whether a policy can run it in float32.
        recipe: That of a product in float8; else empty.
    """

    kind: str
    module: str
    op: str
    stage: str
    dtype: str
    file: str
    line: int
    code: str
    why: str
    score: float
    members: tuple[int, ...]
    is_mendable: bool
    recipe: str = ""

    def __str__(self) -> str:
        """One line."""
        where = f"{self.module}: " if self.module else ""
        dtype = f"float8 {self.recipe}" if self.recipe else self.dtype
        return f"{where}{self.op} ({self.stage}, {dtype}): {self.why}"


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
    """Describes how much of a result overflowed."""
    part = f"{record.overflows} of {record.numel} elements overflow"
    limit = limit_of(record.result_dtype)
    if record.max_abs > limit and record.max_abs != float("inf"):
        return f"{part}: |x| is up to {number(record.max_abs)}, the limit is {limit:.6g}"
    return part


def flush_words(record: OpRecord) -> str:
    """Describes how much of a result, or of operands in float8, was flushed to zero."""
    if record.recipe:
        limit = limit_of(record.dtype)
        return (
            f"{share(record.underflow)} of the elements of its operands are flushed to zero, as "
            f"scales bring the largest ones to {limit:.6g}, the limit of {record.dtype}"
        )
    return f"{share(record.underflow)} of its elements are flushed to zero"


def sentence_on(record: OpRecord) -> str:
    """Describes what was measured of an op."""
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

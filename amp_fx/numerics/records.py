"""Records of a report on accuracy, and texts about them."""

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
        record: The op that made the error, or the one that made constants with this error.
        position: The position of the result among the op's results.
        eps: The error.
        is_written: True if the op wrote the result in place.
        geometry: Sizes, strides and offset if it wrote to a view.
        is_of_constant: True if the op that introduced the error is upstream of the record.
    """

    record: OpRecord
    position: int
    eps: torch.Tensor
    is_written: bool = False
    geometry: tuple[Any, ...] | None = None
    is_of_constant: bool = False

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
        index: The number of the op, in the order in which ops ran.
        stage: ``"forward"`` or ``"backward"``.
        module: The path of the innermost module; in the backward, that of the forward.
        module_type: The class of that module.
        op: The name of the op in a policy (``"linear"``); ``""`` if no policy changes it.
        kernel: The op of the dispatcher: ``"aten::addmm"``.
        dtype: The dtype of the result.
        shape: The sizes of the result.
        file: The source file of the line that calls the op, or ``""``.
        line: The number of the line, or 0.
        code: The text of the line.
        inputs: The numbers of the ops that made the inputs.
        accumulated_in: The largest relative error of the inputs.
        effect: The change of the loss by the op's own error, to first order; None if unknown.
        effect_sq: The sum of the squares of that change, element by element.
    """

    computed = (
        "local",
        "accumulated",
        "effect_rms",
        "norm",
        "amplification",
        "underflow",
        "headroom",
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

    @property
    def effect_rms(self) -> float:
        """The effect on the loss if the errors had random signs."""
        return math.sqrt(self.effect_sq)

    @property
    def norm(self) -> float:
        """The norm (L2) of the result in the reference program."""
        return math.sqrt(self.shadow_sq)

    @property
    def amplification(self) -> float:
        """The ratio of the error to that of the inputs, or to one rounding."""
        unit = UNIT.get(self.dtype, UNIT["float32"])
        return self.accumulated / max(self.accumulated_in, unit)

    @property
    def underflow(self) -> float:
        """The share of elements that became zero, of those that are nonzero in the reference."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def headroom(self) -> float:
        """Powers of two between the largest value and the dtype's limit; negative above it."""
        limit = limit_of(self.dtype) if self.is_float else math.inf
        if self.max_abs == 0 or not math.isfinite(limit):
            return math.inf
        return math.log2(limit / self.max_abs) if math.isfinite(self.max_abs) else -math.inf

    @property
    def is_float(self) -> bool:
        """True if the result is a floating-point tensor."""
        return bool(getattr(torch, self.dtype).is_floating_point)

    @property
    def is_overflow(self) -> bool:
        """True if elements other than a mask become infinite or NaN here."""
        return self.overflows > self.fills or self.singular > 0

    @property
    def label(self) -> str:
        """The name of the op in a policy, or else that of the kernel."""
        return self.op or self.kernel.removeprefix("aten::")


@dataclasses.dataclass(frozen=True)
class GradientRecord:
    """The gradient of one leaf: a parameter, or an input that requires one.

    Attributes:
        name: The path of the parameter; ``"input 0"`` for others.
        shape: The sizes.
        error: The relative error (L2) against the reference program.
        cosine: The cosine of the angle between both.
        norm: The norm (L2) in the reference program. A gradient that is zero but for rounding, such
            as that of the bias of attention's keys, has harmless errors as large as itself.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    cosine: float
    norm: float


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Ops that cause harm, in one module or in repeated modules.

    Attributes:
        kind: ``"overflow"``, ``"underflow"``, ``"local error"`` or ``"growth"`` (of errors, in
            one module).
        module: The path of the module; ``*`` replaces the numbers of repeated modules.
        op: The op to repair, by its name in a policy, or else that of the kernel.
        stage: ``"forward"`` or ``"backward"``.
        dtype: The dtype of the op.
        file: The source file of the line that calls the op, or ``""``.
        line: The number of the line, or 0.
        code: The text of the line.
        why: The reason, in one sentence.
        score: The ratio of the measure to its threshold.
        members: The numbers of the ops (``OpRecord.index``).
        is_mendable: True if a policy can run the op in float32.
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

    def __str__(self) -> str:
        """Returns one line."""
        where = f"{self.module}: " if self.module else ""
        return f"{where}{self.op} ({self.stage}, {self.dtype}): {self.why}"


def number(value: float) -> str:
    """Returns a number with two digits: ``1.2e-04``, ``0.12``, ``3.4``."""
    if value == 0 or value != value or abs(value) == float("inf"):
        return f"{value:.0f}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    return f"{value:.1e}"


def share(value: float) -> str:
    """Returns a share in per cent: ``1.2 %``."""
    return f"{100 * value:.3g} %"


def limit_of(dtype: str) -> float:
    """Returns the largest number of a dtype."""
    return float(torch.finfo(getattr(torch, dtype)).max)


def overflow_words(record: OpRecord) -> str:
    """Describes how much of a result overflowed."""
    part = f"{record.overflows} of {record.numel} elements overflow"
    limit = limit_of(record.dtype)
    if record.max_abs > limit and record.max_abs != float("inf"):
        return f"{part}: |x| is up to {number(record.max_abs)}, the limit is {limit:.6g}"
    return part


def flush_words(record: OpRecord) -> str:
    """Describes how much of a result was flushed to zero."""
    return f"{share(record.underflow)} of its elements are flushed to zero"

"""What a report consists of: plain frozen records of strings and numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name

if TYPE_CHECKING:
    from amp_fx.numerics.seen import Seen

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""The largest relative error of one rounding, by dtype."""


@dataclasses.dataclass(frozen=True)
class OpRecord:
    """One op of the dispatcher that ran, in one batch or in several.

    Attributes:
        index: Its number, in the order in which ops ran.
        stage: ``"forward"`` or ``"backward"``.
        module: The path of the innermost module around it, in the backward that of its forward.
        module_type: That module's class.
        op: What a policy calls it (``"linear"``); ``""`` where no policy reaches it.
        kernel: The op itself: ``"aten::addmm"``.
        dtype: The dtype of its result.
        shape: The sizes of its result.
        file: Source file of the line that calls it, or ``""``.
        line: The line's number, or 0.
        code: The line's text.
        inputs: Numbers of the ops that made its inputs.
        num_batches: How many batches the numbers are of.
        numel: Elements of its results, in all batches.
        local: Relative error (L2) of the op itself: against the reference on the same inputs.
        accumulated: Relative error (L2) against the reference program.
        accumulated_in: The largest such error of its inputs.
        effect: What its own error does to the loss, to first order; None where that is unknown.
        effect_rms: The root of the sum of its squares over elements: what it would be if the
            signs of the errors were by chance.
        overflows: Elements that became infinite or NaN, from finite ones.
        fills: Those among them that are one large negative number: a mask's.
        inherited: Elements that are so because an input is.
        poisoned: NaNs among them, where the reference program has none.
        singular: Elements that are infinite or NaN though the inputs are finite, on the same
            inputs in the reference too: the logarithm of what became zero.
        flushed: Elements that became zero and are none in the reference on the same inputs.
        nonzero: Elements that are not zero there.
        lost: Elements that are zero, and none in the reference program.
        flips: Elements of discrete results (indices, masks) that differ.
        max_abs: The largest absolute value in the reference program.
        norm: The norm (L2) of the result there.
        is_origin: Whether the reference program becomes infinite or NaN here.
        integers: The largest of integers that enter a product rounded; 0 where none do.
    """

    index: int
    stage: str
    module: str
    module_type: str
    op: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    line: int
    code: str
    inputs: tuple[int, ...]
    num_batches: int
    numel: int
    local: float
    accumulated: float
    accumulated_in: float
    effect: float | None
    effect_rms: float
    overflows: int
    fills: int
    inherited: int
    poisoned: int
    singular: int
    flushed: int
    nonzero: int
    lost: int
    flips: int
    max_abs: float
    norm: float
    is_origin: bool
    integers: float = 0.0

    @property
    def amplification(self) -> float:
        """How much larger the error is than that of the inputs, or than one rounding."""
        unit = UNIT.get(self.dtype, UNIT["float32"])
        return self.accumulated / max(self.accumulated_in, unit)

    @property
    def underflow(self) -> float:
        """The share of elements that became zero, of those that are none in the reference."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def headroom(self) -> float:
        """Powers of two between the largest value and the dtype's limit; negative beyond it."""
        limit = torch.finfo(getattr(torch, self.dtype)).max if self.is_float else math.inf
        if self.max_abs == 0 or not math.isfinite(limit):
            return math.inf
        return math.log2(limit / self.max_abs) if math.isfinite(self.max_abs) else -math.inf

    @property
    def is_float(self) -> bool:
        """Whether its result is of floating-point numbers."""
        return bool(getattr(torch, self.dtype).is_floating_point)

    @property
    def name(self) -> str:
        """Unique in a report: ``"forward_12"``."""
        return f"{self.stage}_{self.index}"

    @property
    def is_overflow(self) -> bool:
        """Whether something becomes infinite or NaN here, other than a mask."""
        return self.overflows > self.fills or self.singular > 0

    @property
    def label(self) -> str:
        """What to call the op: as a policy does, else by itself."""
        return self.op or self.kernel.removeprefix("aten::")

    @property
    def reason(self) -> str:
        """What was measured, as a sentence."""
        from amp_fx.numerics.words import sentence_on

        return sentence_on(self)


@dataclasses.dataclass(frozen=True)
class GradientRecord:
    """The gradient of one leaf: a parameter, or an input that requires one.

    Attributes:
        name: The parameter's path; ``"input 0"`` for others.
        shape: Its sizes.
        error: Relative error (L2) against the reference program.
        cosine: Of the angle between both.
        flushed: The share of elements that are zero, and none in the reference program.
        max_abs: The largest absolute value in the reference program.
        norm: Its norm (L2) there. What is zero but for rounding, as the gradient of the bias of
            attention's keys, has errors as large as itself, and they do no harm.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    cosine: float
    flushed: float
    max_abs: float
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
        """One line."""
        where = f"{self.module}: " if self.module else ""
        return f"{where}{self.op} ({self.stage}, {self.dtype}): {self.why}"


def record_of(seen: Seen) -> OpRecord:
    """The record of what was seen of one op."""
    measures, site = seen.measures, seen.site
    return OpRecord(
        index=seen.index,
        stage=seen.stage,
        module=site.module,
        module_type=site.module_type,
        op=site.op,
        kernel=seen.kernel,
        dtype=dtype_name(seen.dtype),
        shape=seen.shape,
        file=site.file,
        line=site.line,
        code=site.code,
        inputs=seen.inputs,
        num_batches=1,
        numel=measures.numel,
        local=measures.local,
        accumulated=measures.accumulated,
        accumulated_in=seen.error_in,
        effect=seen.effect,
        effect_rms=math.sqrt(seen.effect_sq),
        overflows=measures.overflows,
        fills=measures.fills,
        inherited=measures.inherited,
        poisoned=measures.poisoned,
        singular=measures.singular,
        flushed=measures.flushed,
        nonzero=measures.nonzero,
        lost=measures.lost,
        flips=measures.flips,
        max_abs=measures.max_abs,
        norm=math.sqrt(measures.shadow_sq),
        is_origin=seen.is_origin,
        integers=seen.integers,
    )


def joined(ours: OpRecord, theirs: OpRecord) -> OpRecord:
    """The record of an op in two sets of batches: counts add up, errors are the larger ones."""
    effects = [e for e in (ours.effect, theirs.effect) if e is not None]
    return dataclasses.replace(
        ours,
        num_batches=ours.num_batches + theirs.num_batches,
        numel=ours.numel + theirs.numel,
        local=max(ours.local, theirs.local),
        accumulated=max(ours.accumulated, theirs.accumulated),
        accumulated_in=max(ours.accumulated_in, theirs.accumulated_in),
        effect=sum(effects) if effects else None,
        effect_rms=math.hypot(ours.effect_rms, theirs.effect_rms),
        overflows=ours.overflows + theirs.overflows,
        fills=ours.fills + theirs.fills,
        inherited=ours.inherited + theirs.inherited,
        poisoned=ours.poisoned + theirs.poisoned,
        singular=ours.singular + theirs.singular,
        flushed=ours.flushed + theirs.flushed,
        nonzero=ours.nonzero + theirs.nonzero,
        lost=ours.lost + theirs.lost,
        flips=ours.flips + theirs.flips,
        max_abs=max(ours.max_abs, theirs.max_abs),
        norm=math.hypot(ours.norm, theirs.norm),
        is_origin=ours.is_origin or theirs.is_origin,
        integers=max(ours.integers, theirs.integers),
    )


def as_plain(value: Any) -> Any:
    """A tree of records with only what JSON has: ``"nan"`` and ``"inf"`` are strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

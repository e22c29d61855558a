"""One workload, all contenders: what each took, and whether the comparison was fair.

Peak memory is what a contender keeps, and what a call needs on top.
On an accelerator its allocator counts both. On a CPU resident memory says little, because
freed pages stay: there, what is kept is the sum over the storages of all tensors that came to
be with the contender, and what a call needs is the peak of what torch's CPU allocator gave out
during one call, as the profiler records it. Scratch space of libraries is in neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import mmap
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from amp_fx import weight_cache
from amp_fx.bench.contenders import (
    AMP_FX,
    BY_NAME,
    FLOAT32,
    LEAN,
    LIMIT,
    LIMIT_FROZEN,
    NATIVE,
    NATIVE_FROZEN,
    UNCACHED,
    compiling,
    contenders_of,
    prepare,
)
from amp_fx.bench.other_process import OtherProcess
from amp_fx.bench.timing import WARM_UP_CALLS, time_in_turns
from amp_fx.demo.train import wait_for
from amp_fx.torch_private.dynamo import counters
from amp_fx.torch_private.tensors import data_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.benchmark import Measurement

    from amp_fx.bench.contenders import Contender, Run, Workload
    from amp_fx.bench.settings import Settings

    Watch = Callable[[str, int, int], None]
    "Told of progress: what is being done, how much of it is done, how much there is."

log = logging.getLogger(__name__)

ON_CPU = "tensors alive after warm-up and the CPU allocator's peak in one call, by the profiler"
ON_ACCELERATOR = "the allocator's peak in one call, less what was allocated before the contender"


class MemoryMeter:
    """Measures one contender; make it before the contender is built."""

    def __init__(self, device: torch.device) -> None:
        """Takes what is allocated now for other people's."""
        self.device = device
        self._before = _kept_bytes(device)

    def peak(self, run: Run) -> int:
        """Bytes of a contender that was called before, at the peak of one more call."""
        if self.device.type == "cpu":
            kept = _kept_bytes(self.device) - self._before
            return kept + _cpu_peak(run)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(self.device)
        run()
        torch.accelerator.synchronize(self.device)
        return torch.accelerator.max_memory_allocated(self.device) - self._before


def how_measured(device: torch.device) -> str:
    """Describes how figures are measured on a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def _kept_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    alive = (obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, torch.nn.Parameter))
    sizes: dict[int, int] = {}
    for tensor in (tensor for tensor in alive if tensor.device.type == "cpu"):
        if tensor.layout is torch.strided:  # views share a storage, and so do aliases
            sizes[data_address(tensor)] = tensor.untyped_storage().nbytes()
        else:  # packed for oneDNN, say: without padding
            sizes[id(tensor)] = tensor.numel() * tensor.itemsize
    return sum(sizes.values())


def _cpu_peak(run: Run) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events torch 2.11 warns of cycles, of which this has one.
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _no_standard_error(), profile:
        run()
    result: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in result.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    """Drops the two lines that the profiler's library writes past Python for each use."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


CASTS, ROOF = "casts", "roof"

OUTSIDE = 0.05
"""How often a figure's interval may miss."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The samples of one contender.

    Attributes:
        name: The contender.
        timing: Seconds per call or per update of the weights.
        peak_bytes: Its memory, see ``amp_fx.bench.compare``; None if not measured.
        first_call: Seconds of the first call, which compiles; a later contender may find
            kernels of an earlier one. None if not measured.
        num_graphs: Graphs that were compiled for it; None if not counted.
        error: Norm of the difference from eager float32's result, by that result's norm; None for
            training.
    """

    name: str
    timing: Measurement
    peak_bytes: int | None = None
    first_call: float | None = None
    num_graphs: int | None = None
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The samples of all contenders for one workload.

    Attributes:
        workload: Its name.
        measured: One for each contender.
        failures: Why others have no figures, by contender.
        num_recompiled: Graphs that were compiled while timing: more than none spoils it.
    """

    workload: str
    measured: tuple[Measured, ...]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    num_recompiled: int = 0

    def ratio(self, name: str, reference: str) -> float | None:
        """Time of one contender by that of another; None if one of them is missing."""
        medians = {measured.name: measured.timing.median for measured in self.measured}
        if name not in medians or reference not in medians:
            return None
        return medians[name] / medians[reference]

    def paired_ratio(self, name: str, reference: str) -> float | None:
        """The median over rounds of one contender's time by that of another in that round.

        Unlike `ratio` it does not see a machine that becomes slower or faster from round to
        round. None if one of them is missing.
        """
        ratios = self._ratios(name, reference)
        return statistics.median(ratios) if ratios else None

    def paired_interval(self, name: str, reference: str) -> tuple[float, float] | None:
        """Between which ratios the median of endless rounds lies, with 95 % confidence.

        Those of the rounds that stand so far from either end (the sign test's interval; nothing
        is assumed of how times are spread). None with fewer than six rounds.
        """
        ratios = sorted(self._ratios(name, reference))
        skipped = _skipped_at_either_end(len(ratios))
        return None if skipped is None else (ratios[skipped], ratios[-1 - skipped])

    def _ratios(self, name: str, reference: str) -> list[float]:
        return [a / b for a, b in self.rounds(name, reference)]

    def rounds(self, name: str, other: str) -> list[tuple[float, float]]:
        """The samples of two contenders, round by round; none if one of them is missing."""
        samples = {measured.name: measured.timing.times for measured in self.measured}
        if name not in samples or other not in samples:
            return []
        return list(zip(samples[name], samples[other], strict=True))


def _skipped_at_either_end(num_rounds: int) -> int | None:
    """Counts the sorted samples that the interval of their median leaves out on each side."""
    beyond, skipped = 0.0, -1
    while (beyond := beyond + math.comb(num_rounds, skipped + 1) / 2**num_rounds) <= OUTSIDE / 2:
        skipped += 1
    return None if skipped < 0 else skipped


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number that is no contender's time."""

    name: str
    value: float
    unit: str
    interval: tuple[float, float] | None = None


def compare(
    workload: Workload,
    settings: Settings,
    watch: Watch,
    contenders: Sequence[Contender] | None = None,
) -> tuple[Comparison, list[Figure]]:
    """Builds, warms up and times all contenders of a workload, or those that are given.

    One that fails is left out and named, so that it costs the others nothing.
    """
    contenders = contenders_of(workload, settings) if contenders is None else contenders
    total = len(contenders) + settings.repeats
    runs: dict[str, Run] = {}
    known: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    expected = None if workload.micro_batches else _exact(workload, settings)
    for number, contender in enumerate(contenders):
        watch(f"{workload.name}: building {contender.name}", number, total)
        try:
            run, known[contender.name] = _build(contender, workload, settings, expected)
        except Exception as error:
            log.debug("%s failed", contender.name, exc_info=True)
            first_line = str(error).strip().partition("\n")[0]
            failures[contender.name] = f"{type(error).__name__}: {first_line}"
        else:
            runs[contender.name] = run
    if workload.micro_batches:
        runs[CASTS] = _casting(workload, settings)
    if workload.weight_bytes:
        runs[ROOF] = reading(workload.weight_bytes)
    num_graphs = _num_graphs()
    timings = time_in_turns(
        runs,
        repeats=settings.repeats,
        steps=settings.steps,
        on_round=lambda n: watch(f"{workload.name}: timing", len(contenders) + n, total),
    )
    num_recompiled = _num_graphs() - num_graphs
    casts, roof = timings.pop(CASTS, None), timings.pop(ROOF, None)
    measured = tuple(Measured(name, timing, **known[name]) for name, timing in timings.items())
    comparison = Comparison(workload.name, measured, failures, num_recompiled)
    pairs = (paired_figure(comparison, *pair) for pair in _PAIRS)
    figures = [figure for figure in pairs if figure is not None]
    if (best := _fastest_as_exact(comparison)) is not None:
        figures += filter(None, [paired_figure(comparison, AMP_FX, best)])
    if roof is not None:
        figures += _roof_figures(workload, comparison, roof)
    if casts is not None:
        figures += _cast_figures(workload, comparison, casts)
    if AMP_FX in runs and not workload.micro_batches:
        figures.append(_after_write(workload, runs[AMP_FX], settings))
    torch.compiler.reset()
    return comparison, figures


def _exact(workload: Workload, settings: Settings) -> torch.Tensor:
    """Returns the result of a model in eager float32."""
    result = prepare(BY_NAME[FLOAT32], workload, settings)()
    assert isinstance(result, torch.Tensor)
    return result


def _error(result: object, expected: torch.Tensor) -> float:
    assert isinstance(result, torch.Tensor)
    return float((result.double() - expected).norm() / expected.double().norm())


def _build(
    contender: Contender, workload: Workload, settings: Settings, expected: torch.Tensor | None
) -> tuple[Run, dict[str, Any]]:
    """A contender that is ready to be timed, and what is known of it before (``Measured``)."""
    if contender.package is not None:
        other = OtherProcess(contender, workload, settings)
        return other, {"error": None if expected is None else _error(other(), expected)}
    num_graphs = _num_graphs()
    meter = MemoryMeter(settings.device)
    run = prepare(contender, workload, settings)
    with compiling(contender):
        start = time.perf_counter()
        result = run()
        wait_for(settings.device)
        first_call = time.perf_counter() - start
    error = None if expected is None else _error(result, expected)
    del result
    for _ in range(WARM_UP_CALLS):
        run()
    peak = meter.peak(run)
    compiled = _num_graphs() - num_graphs
    return run, {
        "peak_bytes": peak,
        "first_call": first_call,
        "num_graphs": compiled,
        "error": error,
    }


def _num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _after_write(workload: Workload, run: Run, settings: Settings) -> Figure:
    """Times the call after a write of all weights: invalidating their values is as good."""
    timings = time_in_turns(
        {AMP_FX: run}, repeats=settings.repeats, steps=1, before={AMP_FX: weight_cache.invalidate}
    )
    name = f"{workload.name}: {AMP_FX}, the first call after a write of all weights"
    return Figure(name, 1e3 * timings[AMP_FX].median, "ms")


def _casting(workload: Workload, settings: Settings) -> Run:
    """Casts every weight of a model once, as a step under autocast has to."""
    with settings.device:
        weights = list(workload.build().parameters())

    @torch.no_grad()
    def run() -> None:
        for weight in weights:
            weight.to(settings.dtype)

    return run


def reading(num_bytes: int) -> Run:
    """Returns a run that reads so many bytes from memory, in huge pages where Linux has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1).sum


AS_EXACT = 1.5
"""Contenders whose errors are at most so many times amp_fx's are as exact."""


def _fastest_as_exact(comparison: Comparison) -> str | None:
    """Returns the fastest of the other contenders of float32 models that is as exact as amp_fx."""
    errors = {m.name: m.error for m in comparison.measured if m.error is not None}
    limit = AS_EXACT * errors.get(AMP_FX, 0.0)
    times = {
        measured.name: measured.timing.median
        for measured in comparison.measured
        if errors.get(measured.name, math.inf) <= limit
        and not (measured.name.startswith((AMP_FX, LIMIT)))
    }
    return min(times, key=times.__getitem__, default=None)


def _roof_figures(
    workload: Workload, comparison: Comparison, roof: Measurement
) -> Iterator[Figure]:
    name, size = workload.name, workload.weight_bytes
    yield Figure(f"{name}: reading as many bytes as its weights have", 1e3 * roof.median, "ms")
    yield Figure(f"{name}: the bandwidth of that", size / roof.median / 1e9, "GB/s")
    for measured in comparison.measured:
        pairs = zip(roof.times, measured.timing.times, strict=True)
        share = statistics.median(limit / seconds for limit, seconds in pairs)
        yield Figure(f"{name}: {measured.name}, share of that bandwidth", share, "times")


_PAIRS = (
    *((NATIVE, AMP_FX), (NATIVE, UNCACHED), (NATIVE_FROZEN, AMP_FX), (LIMIT_FROZEN, AMP_FX)),
    *((NATIVE, LEAN), (LIMIT, LEAN)),
)
"""The headline, and beside it what the cache and the policy do to it."""


def paired_figure(comparison: Comparison, name: str, reference: str) -> Figure | None:
    """One contender's time by that of another, round by round; None if one is missing."""
    ratio = comparison.paired_ratio(name, reference)
    if ratio is None:
        return None
    what = f"{comparison.workload}: {name} / {reference}, round by round"
    return Figure(what, ratio, "times", comparison.paired_interval(name, reference))


def _cast_figures(
    workload: Workload, comparison: Comparison, casts: Measurement
) -> Iterator[Figure]:
    name, number = workload.name, workload.micro_batches
    yield Figure(f"{name}: casting every weight once", 1e3 * casts.median, "ms")
    for measured in comparison.measured:
        if measured.name == NATIVE:
            share = 100 * casts.median / measured.timing.median
            yield Figure(f"{name}: that share of a native step", share, "%")
            if number > 1:
                what = f"{number} times that, as it does, share of a native step"
                yield Figure(f"{name}: {what}", number * share, "%")

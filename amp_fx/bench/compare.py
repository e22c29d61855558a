"""Compares all contenders on one workload: time, peak memory and errors."""

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
    "Called with progress: a description, the number of finished steps, and that of all steps."

log = logging.getLogger(__name__)

ON_CPU = "tensors alive after warm-up and the CPU allocator's peak in one call, by the profiler"
ON_ACCELERATOR = "the allocator's peak in one call, less what was allocated before the contender"


class MemoryMeter:
    """Measures the peak memory of a contender, which must be built after the meter.

    The peak is the memory that the contender holds between calls, plus that of one call. On an
    accelerator, the allocator counts both. On a CPU, resident memory does not measure it, because
    freed pages stay resident. There, the first part is the sum of the storages of all tensors that
    were created since, and the second the peak of torch's CPU allocator during one call, from the
    profiler. Scratch memory of libraries is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        """Records the memory that is allocated before the contender is built."""
        self.device = device
        self._before = _allocated_bytes(device)

    def peak(self, run: Run) -> int:
        """Returns the peak memory in bytes of a contender that was called before."""
        if self.device.type == "cpu":
            held = _allocated_bytes(self.device) - self._before
            return held + _cpu_peak(run)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(self.device)
        run()
        torch.accelerator.synchronize(self.device)
        return torch.accelerator.max_memory_allocated(self.device) - self._before


def how_measured(device: torch.device) -> str:
    """Returns a description of how memory is measured on a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def _allocated_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    alive = (obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, torch.nn.Parameter))
    sizes: dict[int, int] = {}
    for tensor in (tensor for tensor in alive if tensor.device.type == "cpu"):
        if tensor.layout is torch.strided:  # views and aliases share a storage
            sizes[data_address(tensor)] = tensor.untyped_storage().nbytes()
        else:  # for example packed for oneDNN; padding is not counted
            sizes[id(tensor)] = tensor.numel() * tensor.itemsize
    return sum(sizes.values())


def _cpu_peak(run: Run) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events, torch 2.11 warns about cycles.
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
    """Discards the two lines that the profiler's library writes to stderr in each use."""
    sys.stderr.flush()
    original = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


CASTS, ROOF = "casts", "roof"

OUTSIDE = 0.05
"""The probability that an interval does not contain the true value."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The samples of one contender.

    Attributes:
        name: The name of the contender.
        timing: Seconds per call or per update of the weights.
        peak_bytes: Peak memory (``MemoryMeter``); None if not measured.
        first_call: Seconds of the first call, which compiles. Kernels that an earlier contender
            compiled may be reused. None if not measured.
        num_graphs: Number of compiled graphs; None if not counted.
        error: Norm of the difference from the result of eager float32, divided by the norm of that
            result; None for training.
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
        workload: The name of the workload.
        measured: The samples of each contender.
        failures: Errors of contenders that failed, by name.
        num_recompiled: Number of graphs that were compiled during timing, which should be 0.
    """

    workload: str
    measured: tuple[Measured, ...]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    num_recompiled: int = 0

    def ratio(self, name: str, reference: str) -> float | None:
        """Returns the ratio of two contenders' median times, or None if one is missing."""
        medians = {measured.name: measured.timing.median for measured in self.measured}
        if name not in medians or reference not in medians:
            return None
        return medians[name] / medians[reference]

    def paired_ratio(self, name: str, reference: str) -> float | None:
        """Returns the median over rounds of the ratio of two contenders' times.

        Unlike ``ratio``, it does not depend on changes of the machine's speed between rounds.
        Returns None if one contender is missing.
        """
        ratios = self._ratios(name, reference)
        return statistics.median(ratios) if ratios else None

    def paired_interval(self, name: str, reference: str) -> tuple[float, float] | None:
        """Returns the 95 % confidence interval of ``paired_ratio``, or None for under six rounds.

        The ends are order statistics of the ratios (the interval of the sign test), which assumes
        nothing about the distribution of times.
        """
        ratios = sorted(self._ratios(name, reference))
        skipped = _skipped_at_either_end(len(ratios))
        return None if skipped is None else (ratios[skipped], ratios[-1 - skipped])

    def _ratios(self, name: str, reference: str) -> list[float]:
        return [a / b for a, b in self.rounds(name, reference)]

    def rounds(self, name: str, other: str) -> list[tuple[float, float]]:
        """Returns pairs of samples of two contenders in the same round; empty if one is missing."""
        samples = {measured.name: measured.timing.times for measured in self.measured}
        if name not in samples or other not in samples:
            return []
        return list(zip(samples[name], samples[other], strict=True))


def _skipped_at_either_end(num_rounds: int) -> int | None:
    """Returns the number of sorted samples outside the median's interval, on each side."""
    beyond, skipped = 0.0, -1
    while (beyond := beyond + math.comb(num_rounds, skipped + 1) / 2**num_rounds) <= OUTSIDE / 2:
        skipped += 1
    return None if skipped < 0 else skipped


@dataclasses.dataclass(frozen=True)
class Figure:
    """A single number in the results, other than the time of a contender."""

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
    """Builds, warms up and times the contenders of a workload, by default all of them.

    Contenders that fail are excluded and listed in ``Comparison.failures``.
    """
    contenders = contenders_of(workload, settings) if contenders is None else contenders
    total = len(contenders) + settings.repeats
    runs: dict[str, Run] = {}
    facts: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    expected = None if workload.micro_batches else _exact(workload, settings)
    for number, contender in enumerate(contenders):
        watch(f"{workload.name}: building {contender.name}", number, total)
        try:
            run, facts[contender.name] = _build(contender, workload, settings, expected)
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
    measured = tuple(Measured(name, timing, **facts[name]) for name, timing in timings.items())
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
    """Builds and warms up a contender; returns its run, and the fields of ``Measured`` so far."""
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
    """Times the call after a write of all weights, emulated by invalidating cached values."""
    timings = time_in_turns(
        {AMP_FX: run}, repeats=settings.repeats, steps=1, before={AMP_FX: weight_cache.invalidate}
    )
    name = f"{workload.name}: {AMP_FX}, the first call after a write of all weights"
    return Figure(name, 1e3 * timings[AMP_FX].median, "ms")


def _casting(workload: Workload, settings: Settings) -> Run:
    """Returns a run that casts every weight of a model once, like a step under autocast."""
    with settings.device:
        weights = list(workload.build().parameters())

    @torch.no_grad()
    def run() -> None:
        for weight in weights:
            weight.to(settings.dtype)

    return run


def reading(num_bytes: int) -> Run:
    """Returns a run that reads bytes from memory, in huge pages if Linux supports them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1).sum


AS_EXACT = 1.5
"""A contender is as exact as amp_fx if its error is at most this multiple of amp_fx's error."""


def _fastest_as_exact(comparison: Comparison) -> str | None:
    """Returns the fastest contender that is as exact as amp_fx, without variants of amp_fx.

    Contenders with weights stored in the low dtype (``limit``) are excluded.
    """
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
    (NATIVE, AMP_FX),
    (NATIVE, UNCACHED),
    (NATIVE_FROZEN, AMP_FX),
    (LIMIT_FROZEN, AMP_FX),
    (NATIVE, LEAN),
    (LIMIT, LEAN),
)
"""Pairs of contenders whose ratios are shown: the main result, and the effect of single options."""


def paired_figure(comparison: Comparison, name: str, reference: str) -> Figure | None:
    """Returns the paired ratio of two contenders with its interval, or None if one is missing."""
    ratio = comparison.paired_ratio(name, reference)
    if ratio is None:
        return None
    description = f"{comparison.workload}: {name} / {reference}, round by round"
    return Figure(description, ratio, "times", comparison.paired_interval(name, reference))


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
                description = f"{number} times that, as it does, share of a native step"
                yield Figure(f"{name}: {description}", number * share, "%")

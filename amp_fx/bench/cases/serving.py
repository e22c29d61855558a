"""Times the latency of single calls, and the throughput of many clients of one model.

Models are compiled again for each number of threads, because inductor compiles its loops for the
current number.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch.utils import benchmark

from amp_fx.bench.compare import Figure
from amp_fx.bench.contenders import AMP_FX, BY_NAME, NATIVE, Workload, prepare
from amp_fx.bench.timing import THREADS, WARM_UP_CALLS, threads, time_in_turns
from amp_fx.demo.models import MLP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Comparison, Watch
    from amp_fx.bench.contenders import Run
    from amp_fx.bench.settings import Settings

CLIENTS = 8
CALLS_PER_ROUND = 20
PERCENTILES = (50, 95, 99)


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Measures native and amp_fx on inference of one row, with 1 and 2 threads per call."""
    names = [name for name in (NATIVE, AMP_FX) if settings.takes_part(name)]
    width = settings.pick(tiny=16, cpu=1024)
    x = torch.randn(1, width, device=settings.device)
    workload = Workload(f"Linear({width}) x6, batch 1", functools.partial(MLP, width, 6), (x,))
    for num_threads in THREADS:
        title = f"{workload.name}, {num_threads} thread{'s' if num_threads > 1 else ''}"
        watch(title, num_threads, 1 + len(THREADS))
        with threads(num_threads):
            calls = {name: _compiled(name, workload, settings) for name in names}
            yield from _latencies(title, calls, num_threads, settings.repeats)
            yield from _throughputs(f"{title}, {CLIENTS} clients", calls, settings.repeats)
        torch.compiler.reset()


def _compiled(name: str, workload: Workload, settings: Settings) -> Run:
    call = prepare(BY_NAME[name], workload, settings)
    for _ in range(WARM_UP_CALLS):
        call()
    return call


def _latencies(
    what: str, calls: dict[str, Run], num_threads: int, repeats: int
) -> Iterator[Figure]:
    """Yields percentiles over calls of one client, which are timed one by one, in turns."""
    timers = {
        name: benchmark.Timer("call()", globals={"call": call}, num_threads=num_threads)
        for name, call in calls.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, timer in timers.items():
            samples[name] += [timer.timeit(1).median for _ in range(CALLS_PER_ROUND)]
    for name, seconds in samples.items():
        times = torch.tensor(seconds, dtype=torch.float64)
        for percentile in PERCENTILES:
            value = 1e3 * float(times.quantile(percentile / 100))
            yield Figure(f"{what}: {name}, one client, latency p{percentile}", value, "ms")


def _throughputs(what: str, calls: dict[str, Run], repeats: int) -> Iterator[Figure]:
    """Yields calls per second of clients that call one model concurrently, without pauses."""
    with ThreadPoolExecutor(CLIENTS) as pool:

        def serve(call: Run) -> None:
            def client(_: int) -> None:
                for _ in range(CALLS_PER_ROUND):
                    call()

            list(pool.map(client, range(CLIENTS)))

        runs = {name: functools.partial(serve, call) for name, call in calls.items()}
        for run_clients in runs.values():
            run_clients()  # first calls of the threads
        timings = time_in_turns(runs, repeats=repeats, steps=1)
    rates = {name: CLIENTS * CALLS_PER_ROUND / t.median for name, t in timings.items()}
    for name, rate in rates.items():
        yield Figure(f"{what}: {name}", rate, "calls per second")
    if rates.keys() == {NATIVE, AMP_FX}:
        ratio = rates[AMP_FX] / rates[NATIVE]
        yield Figure(f"{what}: throughput of {AMP_FX} / {NATIVE}", ratio, "times")

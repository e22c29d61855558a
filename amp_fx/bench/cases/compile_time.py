"""Times compilation, each time in a new process with new caches."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fx.bench.compare import Comparison, Figure, Measured
from amp_fx.bench.contenders import AMP_FX, NATIVE, NATIVE_FROZEN
from amp_fx.bench.timing import measurement
from amp_fx.dtypes import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.settings import Settings

    Seconds = dict[str, list[float]]

WORKER = "amp_fx.bench.compile_worker"
LAYERS = 12
MAX_REPEATS = 3
"""The maximum number of rounds, because a cold compilation takes tens of seconds."""
TRAINED = (NATIVE, AMP_FX)
SERVED = (NATIVE, NATIVE_FROZEN, AMP_FX)


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Measures cold and warm compilation, and the time in amp_fx for models of several sizes."""
    layers = settings.num_layers(LAYERS)
    cold, warm = _compiled(settings, layers, TRAINED, watch)
    yield _comparison(f"{layers} layers, cold", cold)
    yield _comparison(f"{layers} layers, warm", warm)
    if settings.compiler == "inductor":
        cold_served, warm_served = _compiled(settings, layers, SERVED, watch, is_inference=True)
        yield _comparison(f"{layers} layers for inference, cold", cold_served)
        yield _comparison(f"{layers} layers for inference, warm", warm_served)
    if AMP_FX in cold:
        yield from _own_share(settings, layers, min(cold[AMP_FX]), watch)


def _compiled(
    settings: Settings,
    layers: int,
    contenders: Sequence[str],
    watch: Watch,
    *,
    is_inference: bool = False,
) -> tuple[Seconds, Seconds]:
    """Returns the seconds of each contender with empty caches, and with the caches of that run."""
    cold: Seconds = {}
    warm: Seconds = {}
    names = [name for name in contenders if settings.takes_part(name)]
    repeats = min(settings.repeats, MAX_REPEATS)
    for round_, name in itertools.product(range(repeats), names):
        done = round_ * len(names) + names.index(name)
        watch(f"compiling {layers} layers: {name}", done, repeats * len(names))
        with tempfile.TemporaryDirectory(prefix="amp_fx_bench_") as cache:
            for seconds in (cold, warm):
                measured = _measure(
                    name, layers, settings, settings.compiler, Path(cache), is_inference
                )
                seconds.setdefault(name, []).append(measured["seconds"])
    return cold, warm


def _own_share(
    settings: Settings, layers: int, total: float, watch: Watch
) -> Iterator[Comparison | Figure]:
    """Measures the seconds in amp_fx, without those of the inner compiler."""
    sizes = sorted({max(1, layers // 4), layers, 4 * layers})
    seconds = {}
    for index, size in enumerate(sizes):
        watch(f"amp_fx's own part, {size} layers", index, len(sizes))
        with tempfile.TemporaryDirectory(prefix="amp_fx_bench_") as cache:
            measured = _measure("amp_fx", size, settings, "eager", Path(cache))
            seconds[size] = measured["own_seconds"]
        yield Figure(f"amp_fx's own part, {size} layers", seconds[size], "s")
    for small, large in itertools.pairwise(sizes):
        per_layer = 1e3 * (seconds[large] - seconds[small]) / (large - small)
        yield Figure(f"... for each layer from {small} to {large}", per_layer, "ms")
    share = 100 * seconds[layers] / total
    yield Figure(f"... of a cold compilation of {layers} layers", share, "%")


def _comparison(workload: str, seconds: Seconds) -> Comparison:
    timings = {name: measurement(name, samples) for name, samples in seconds.items()}
    measured = tuple(Measured(name, timing) for name, timing in timings.items())
    return Comparison(workload, measured)


def _measure(
    contender: str,
    layers: int,
    settings: Settings,
    compiler: str,
    cache: Path,
    is_inference: bool = False,
) -> dict[str, float]:
    request = {
        "contender": contender,
        "layers": layers,
        "compiler": compiler,
        "device": str(settings.device),
        "dtype": dtype_name(settings.dtype),
        "tiny": settings.tiny,
        "is_inference": is_inference,
    }
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(
        [sys.executable, "-m", WORKER, json.dumps(request)],
        env=os.environ | caches,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"compiling {layers} layers with {contender}: {last_line}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured

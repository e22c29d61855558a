"""``python -m tests.traffic time``: times the models of ``bytes`` on a GPU.

Each case has a process. All processes compile at the same time; then they are timed one after
another, so that nothing else runs on the GPU. In a process, the contenders of the benchmark take
turns. Times are relative to native ``torch.compile`` under ``torch.autocast``, as in ``roofline``,
which predicts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import contenders as bench
from benchmarks.contenders import Settings
from benchmarks.timing import WARM_UP_CALLS, time_in_turns
from tests.traffic.facts import versions
from tests.traffic.models import CASES, TINY
from tests.traffic.worker import AMP_FX, FROZEN, LEAN, LIMIT, NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from benchmarks.contenders import Contender, Run
    from tests.traffic.models import Case


def _variant(original: str, name: str, **options: Any) -> Contender:
    """Returns a contender of the benchmark with another name and more options."""
    contender = bench.BY_NAME[original]
    more = (*contender.options, *options.items())
    return dataclasses.replace(contender, name=name, options=more)


UNCACHED = "uncached"
_OURS = {"output_dtype": "autocast"}  # as native's
_IN_TRAINING = {"weight_cache": "training", **_OURS}
_GRAPHS = {"triton.cudagraphs": True}
_NATIVE, _LIMIT = bench.BY_NAME[bench.NATIVE], bench.BY_NAME[bench.LIMIT]
INFERENCE = (
    _NATIVE,
    _variant(bench.AMP_FX, AMP_FX, **_OURS),
    _variant(bench.AMP_FX, FROZEN, freezing=True, **_OURS),
    _LIMIT,
)
IN_GRAPHS = (  # inductor's CUDA graphs, for which nothing is frozen
    _variant(bench.NATIVE, NATIVE, **_GRAPHS),
    _variant(bench.AMP_FX, AMP_FX, **_GRAPHS, **_OURS),
    _variant(bench.LIMIT, LIMIT, **_GRAPHS),
)
SEVERAL = (
    _NATIVE,
    _variant(bench.AMP_FX, AMP_FX, **_IN_TRAINING),
    _variant(bench.LEAN, LEAN, **_IN_TRAINING),
)
ONE = (*SEVERAL, _variant(bench.AMP_FX, UNCACHED, **_OURS), _LIMIT)
"""``SEVERAL`` train with several micro-batches per update, and these with one."""
NUM_SEVERAL = 4


class Timed(nn.Module):
    """A model as Dynamo compiles it: the code of ``nn.Sequential`` is shared by all contenders."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of the model."""
        out: torch.Tensor = self.model(x)
        return out


def prepare(case: Case, contender: Contender, settings: Settings, num_micro_batches: int) -> Run:
    """Returns a function that runs one call, or one update if there are micro-batches.

    Unlike the benchmark's workloads, the input gets a gradient, and the result is given one.
    """
    torch.manual_seed(bench.SEED)
    is_trained = num_micro_batches > 0
    stored = settings.dtype if contender.is_stored_low else torch.float32
    with settings.device:
        model = Timed(case.build()).to(stored)
        x = torch.randn(case.shape, dtype=stored, requires_grad=is_trained)
    bench.copy_forward(model, contender.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=bench.LEARNING_RATE, fused=True)
    compiled = bench.compiled(contender, model, (x,), settings)

    def call() -> torch.Tensor:
        with bench.region_of(contender, settings):
            out: torch.Tensor = compiled(x)
        return out

    if not is_trained:
        run: Run = torch.no_grad()(call)
        return run
    grad = torch.ones_like(call())

    def update() -> None:
        for _ in range(num_micro_batches):
            call().backward(grad)  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return update


def kinds(device: torch.device) -> Iterator[tuple[str, Sequence[Contender], int]]:
    """Yields what is timed: its name, the contenders, and the number of micro-batches."""
    yield "inference", INFERENCE, 0
    if device.type == "cuda":
        yield "inference, CUDA graphs", IN_GRAPHS, 0
    yield "training, 1", ONE, 1
    yield f"training, {NUM_SEVERAL}", SEVERAL, NUM_SEVERAL


def serve(connection: Connection, name: str, parsed: argparse.Namespace) -> None:
    """Compiles a case, sends what failed, and sends the times when it is asked for them."""
    case = (TINY if parsed.tiny else CASES)[name]
    settings = Settings(torch.device(parsed.device))
    runs: dict[str, dict[str, Run]] = {}
    failures: dict[str, str] = {}
    for kind, contenders, num_micro_batches in kinds(settings.device):
        for contender in contenders:
            run = _warmed(case, contender, settings, num_micro_batches)
            if isinstance(run, str):
                failures[f"{kind}: {contender.name}"] = run
            else:
                runs.setdefault(kind, {})[contender.name] = run
    connection.send(failures)
    connection.recv()
    rows = []
    for kind, by_contender in runs.items():
        timings = time_in_turns(by_contender, repeats=parsed.repeats)
        seconds = {contender: timing.times for contender, timing in timings.items()}
        rows.append({"case": name, "kind": kind, "seconds": seconds})
    connection.send(rows)


def _warmed(
    case: Case, contender: Contender, settings: Settings, num_micro_batches: int
) -> Run | str:
    """Prepares and compiles a run; returns the message if that fails."""
    try:
        run = prepare(case, contender, settings, num_micro_batches)
        for _ in range(WARM_UP_CALLS):
            run()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return run


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments behind ``time``.

    Returns:
        The exit code: 0; 1 if something could not be timed.
    """
    parsed = _parser().parse_args(list(argv))
    cases = parsed.cases or list(CASES)
    deadline = time.monotonic() + parsed.compile_seconds
    workers = {name: _start(name, parsed) for name in cases}
    failures = {name: _receive(worker, deadline) for name, worker in workers.items()}
    rows: list[dict[str, Any]] = []
    for name, worker in workers.items():
        if _ALL in failures[name]:
            continue
        worker.send(None)
        found = _receive(worker)
        if isinstance(found, dict):
            failures[name] = found
            continue
        rows += found
        sys.stdout.write("".join(f"{line_of(row)}\n" for row in found))
        sys.stdout.flush()
        if parsed.json:
            data = {**versions(), "device": parsed.device, "timings": rows, "failures": failures}
            parsed.json.write_text(json.dumps(data, indent=1) + "\n")
    for name, failed in failures.items():
        for what, why in failed.items():
            sys.stdout.write(f"{name}, {what} failed: {why}\n")
    return int(any(failures.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.traffic time", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", type=_case, metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default: %(default)s")
    parser.add_argument(
        "--compile-seconds", type=float, default=240, help="limit for compiling; default: 240"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _case(name: str) -> str:
    if name not in CASES:
        raise argparse.ArgumentTypeError(f"no case {name}")
    return name


def _start(name: str, parsed: argparse.Namespace) -> Connection:
    """Starts the process of a case, which ends with this one."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of torch
    connection, other_end = context.Pipe()
    context.Process(target=serve, args=(other_end, name, parsed), daemon=True).start()
    other_end.close()  # so that ``recv`` raises an error if the process exits
    return connection


_ALL = "all"


def _receive(worker: Connection, deadline: float | None = None) -> Any:
    """Returns what a process sends, or why nothing of its case can be timed."""
    if deadline is not None and not worker.poll(max(0.0, deadline - time.monotonic())):
        return {_ALL: "did not compile in time"}
    try:
        return worker.recv()
    except EOFError:
        return {_ALL: "its process ended"}


def line_of(row: dict[str, Any]) -> str:
    """Returns the median of each contender, and in parentheses its ratio to native's."""
    medians = {name: statistics.median(times) for name, times in row["seconds"].items()}
    native = medians.get(NATIVE)
    shown = [
        f"{name} {1e6 * seconds:.1f} us" + (f" ({seconds / native:.3f})" if native else "")
        for name, seconds in medians.items()
    ]
    return f"{row['case']}, {row['kind']}: {', '.join(shown)}"

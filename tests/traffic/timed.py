"""``python -m tests.traffic time``: times the models of ``bytes`` on a GPU.

Each case has a process. All processes compile at the same time; then they are timed one after
another, so that nothing else runs on the GPU. In a process, contenders take turns. Times are
relative to native ``torch.compile`` under ``torch.autocast``, as in ``roofline``, which predicts
them.
"""

from __future__ import annotations

import argparse
import json
import selectors
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import amp_fx
from amp_fx.bench.contenders import copy_forward
from amp_fx.bench.settings import versions
from amp_fx.bench.timing import time_in_turns
from tests.traffic.models import CASES, TINY
from tests.traffic.worker import AMP_FX, FROZEN, LEAN, LIMIT, NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.traffic.models import Case

    Call = Callable[[], torch.Tensor]
    Run = Callable[[], object]

MARK = "timed: "
"""Begins each line that a process prints for this command; libraries print lines, too."""
DTYPE = torch.bfloat16
LEARNING_RATE = 1e-5
MICRO_BATCHES = (1, 4)
GRAPHS = {"triton.cudagraphs": True}
"""Options of inductor for its CUDA graphs."""


class Timed(nn.Module):
    """A model as Dynamo compiles it: the code of ``nn.Sequential`` is shared by all contenders."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of the model."""
        out: torch.Tensor = self.model(x)
        return out


def call_of(case: Case, contender: str, device: str, *, trains: bool, graphs: bool) -> Any:
    """Returns the model of a contender, and a function that calls the compiled model.

    Args:
        case: The model and its input.
        contender: ``"native"``, ``"amp_fx"``, ``"frozen"``, ``"lean"`` or ``"limit"``.
        device: A device type.
        trains: Whether gradients are needed.
        graphs: Whether inductor records CUDA graphs.
    """
    torch.manual_seed(0)
    stored = DTYPE if contender == LIMIT else torch.float32
    with torch.device(device):
        model = Timed(case.build()).to(stored)
    copy_forward(model, contender)
    with torch.device(device):
        x = torch.randn(case.shape, dtype=stored, requires_grad=trains)
    options: dict[str, Any] = dict(GRAPHS) if graphs else {}
    if contender in (NATIVE, LIMIT):
        compiled = torch.compile(model, options=options or None, dynamic=False)
    else:
        options |= {"dtype": DTYPE, "policy": LEAN if contender == LEAN else "torch"}
        options["output_dtype"] = "autocast"  # as native's
        options |= {"freezing": True} if contender == FROZEN else {}
        compiled = torch.compile(model, backend="amp_fx", options=options, dynamic=False)

    def call() -> torch.Tensor:
        # A region that is off around a call of amp_fx would tell it to cast nothing.
        region = torch.autocast(device, DTYPE) if contender == NATIVE else nullcontext()
        with region:
            out: torch.Tensor = compiled(x)
        return out

    return model, call


def runs_of(case: Case, device: str) -> Iterator[tuple[str, str, Callable[[], Run]]]:
    """Yields the work to time: its kind, the contender, and a function that prepares it."""
    for graphs in (False, True) if device == "cuda" else (False,):
        kind = "inference, CUDA graphs" if graphs else "inference"
        # Frozen graphs are not recorded.
        for contender in (NATIVE, AMP_FX, *(() if graphs else (FROZEN,)), LIMIT):
            yield kind, contender, _inference(case, contender, device, graphs=graphs)
    for count in MICRO_BATCHES:
        for contender in (NATIVE, AMP_FX, LEAN, *((LIMIT,) if count == 1 else ())):
            yield f"training, {count}", contender, _training(case, contender, device, count)
    yield "training, 1", "compile_step", _training(case, AMP_FX, device, 1, compiles_step=True)


def _inference(case: Case, contender: str, device: str, *, graphs: bool) -> Callable[[], Run]:
    def prepare() -> Run:
        _, call = call_of(case, contender, device, trains=False, graphs=graphs)
        run: Run = torch.no_grad()(call)
        return run

    return prepare


def _training(
    case: Case, contender: str, device: str, count: int, *, compiles_step: bool = False
) -> Callable[[], Run]:
    def prepare() -> Run:
        model, call = call_of(case, contender, device, trains=True, graphs=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=not compiles_step)
        step: Any = amp_fx.compile_step(optimizer) if compiles_step else optimizer.step
        grad = torch.ones_like(call())

        def update() -> None:
            for _ in range(count):
                call().backward(grad)
            step()
            optimizer.zero_grad()

        return update

    return prepare


def serve(name: str, device: str, *, is_tiny: bool, repeats: int) -> None:
    """Compiles all runs of a case, waits for a line on stdin, and prints their times."""
    case = (TINY if is_tiny else CASES)[name]
    runs: dict[str, dict[str, Run]] = {}
    failures: dict[str, str] = {}
    for kind, contender, prepare in runs_of(case, device):
        run = _warmed(prepare)
        if isinstance(run, str):
            failures[f"{kind}: {contender}"] = run
        else:
            runs.setdefault(kind, {})[contender] = run
    _tell({"case": name, "failures": failures})
    sys.stdin.readline()
    for kind, by_contender in runs.items():
        timings = time_in_turns(by_contender, repeats=repeats, steps=None)
        times = {contender: timing.times for contender, timing in timings.items()}
        _tell({"case": name, "kind": kind, "seconds": times})


def _warmed(prepare: Callable[[], Run]) -> Run | str:
    """Prepares and compiles a run; returns the message if that fails."""
    try:
        run = prepare()
        for _ in range(3):
            run()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return run


def _tell(data: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(data)}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments behind ``time``.

    Returns:
        The exit code: 0, or 1 if something could not be timed.
    """
    parsed = _parser().parse_args(list(argv))
    start = time.monotonic()
    workers = {
        name: _start(name, parsed.device, is_tiny=parsed.tiny, repeats=parsed.repeats)
        for name in parsed.cases or CASES
    }
    ready = dict(_ready(workers, start + parsed.compile_seconds))
    rows: list[dict[str, Any]] = []
    failures = {name: {"all": "did not compile in time"} for name in workers if name not in ready}
    failures |= {name: found for name, found in ready.items() if found}
    for name, worker in workers.items():
        if name not in ready:
            worker.kill()
    for name in ready:
        for row in _timed(workers[name]):
            rows.append(row)
            sys.stdout.write(f"{line_of(row)}\n")
            sys.stdout.flush()
            if parsed.json:
                data = {
                    **versions(),
                    "device": parsed.device,
                    "timings": rows,
                    "failures": failures,
                }
                parsed.json.write_text(json.dumps(data, indent=1) + "\n")
    for name, found in failures.items():
        for what, why in found.items():
            sys.stdout.write(f"{name}, {what} failed: {why}\n")
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.traffic time", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default: %(default)s")
    parser.add_argument(
        "--compile-seconds", type=float, default=240, help="limit for compiling; default: 240"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _start(name: str, device: str, *, is_tiny: bool, repeats: int) -> subprocess.Popen[str]:
    text = (
        "from tests.traffic.timed import serve\n"
        f"serve({name!r}, {device!r}, is_tiny={is_tiny}, repeats={repeats})"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ready(
    workers: dict[str, subprocess.Popen[str]], deadline: float
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the names of processes that have compiled, and what failed in them."""
    with selectors.DefaultSelector() as selector:
        for worker in workers.values():
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(key.fileobj)
                elif line.startswith(MARK):
                    data = json.loads(line.removeprefix(MARK))
                    selector.unregister(key.fileobj)
                    yield data["case"], data["failures"]


def _timed(worker: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    out, _ = worker.communicate("go\n")
    for line in out.splitlines():
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


def line_of(row: dict[str, Any]) -> str:
    """Returns the median of each contender, and in parentheses its ratio to native's."""
    medians = {name: sorted(times)[len(times) // 2] for name, times in row["seconds"].items()}
    native = medians.get(NATIVE)
    shown = [
        f"{name} {1e6 * seconds:.1f} us" + (f" ({seconds / native:.3f})" if native else "")
        for name, seconds in medians.items()
    ]
    return f"{row['case']}, {row['kind']}: {', '.join(shown)}"

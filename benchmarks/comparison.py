"""Compares all contenders on one workload, and prints times, errors and ratios."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters
from torch.utils import benchmark

from benchmarks.contenders import (
    BY_NAME,
    FLOAT32,
    LIMIT_FROZEN,
    NATIVE,
    NATIVE_FROZEN,
    compiling,
    contenders_of,
    prepare,
)
from benchmarks.other_process import OtherProcess
from benchmarks.timing import WARM_UP_CALLS, time_in_turns

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

    from benchmarks.contenders import Contender, Run, Settings, Workload

REFERENCES = (NATIVE, NATIVE_FROZEN, LIMIT_FROZEN)
"""Contenders whose time the others are divided by."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The samples of all contenders for one workload.

    Attributes:
        workload: The title of the table.
        timings: Seconds per call, or per update of the weights, by contender.
        errors: Norm of the difference from the result of eager float32, divided by the norm of that
            result, by contender; empty for training.
        failures: Errors of contenders that failed, by name.
    """

    workload: str
    timings: dict[str, Measurement]
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def ratio(self, name: str, reference: str) -> list[float]:
        """Returns the median and the quartiles over rounds of the ratio of two contenders' times.

        It does not depend on changes of the machine's speed between rounds.
        """
        times, others = (
            torch.tensor(self.timings[contender].times, dtype=torch.float64)
            for contender in (name, reference)
        )
        quantiles = times.new_tensor([0.5, 0.25, 0.75])
        return (times / others).quantile(quantiles).tolist()

    def __str__(self) -> str:
        """Returns the table of times and errors, and the ratios to each reference."""
        rows = []
        for name, timing in self.timings.items():
            error = f"error {self.errors[name]:.1e}" if name in self.errors else ""
            row = f"{name:<16} {error}"
            spec = dataclasses.replace(
                timing.task_spec, label=self.workload, sub_label=row, description="median"
            )
            rows.append(dataclasses.replace(timing, task_spec=spec))
        lines = [str(benchmark.Compare(rows))] if rows else []
        for reference in [name for name in REFERENCES if name in self.timings]:
            ratios = [
                "{} {:.2f} ({:.2f} to {:.2f})".format(name, *self.ratio(name, reference))
                for name in self.timings
                if name != reference
            ]
            lines.append(f"time / {reference}'s: {', '.join(ratios)}")
        lines += [f"{name} failed: {error}" for name, error in self.failures.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns all samples, in seconds."""
        seconds = {name: timing.times for name, timing in self.timings.items()}
        return {**dataclasses.asdict(dataclasses.replace(self, timings={})), "seconds": seconds}


def compare(workload: Workload, settings: Settings) -> Comparison:
    """Builds, warms up and times the contenders of a workload.

    Contenders that fail are excluded and listed in ``Comparison.failures``.
    """
    runs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    exact = None if workload.micro_batches else prepare(BY_NAME[FLOAT32], workload, settings)()
    for contender in contenders_of(workload, settings):
        sys.stderr.write(f"{workload.name}: compiling {contender.name}\n")
        try:
            run, result = _build(contender, workload, settings)
        except Exception as error:  # noqa: BLE001
            first_line = str(error).strip().partition("\n")[0]
            failures[contender.name] = f"{type(error).__name__}: {first_line}"
            continue
        runs[contender.name] = run
        if isinstance(exact, torch.Tensor):
            difference = (result.double() - exact).norm()
            errors[contender.name] = (difference / exact.double().norm()).item()
    num_graphs = counters["stats"]["unique_graphs"]
    timings = time_in_turns(runs, repeats=settings.repeats)
    if num_compiled := counters["stats"]["unique_graphs"] - num_graphs:
        failures["timing"] = f"{num_compiled} graphs were compiled meanwhile"
    torch.compiler.reset()
    return Comparison(workload.name, timings, errors, failures)


def _build(contender: Contender, workload: Workload, settings: Settings) -> tuple[Run, Any]:
    """Returns a run that was compiled and warmed up, and the result of its first call."""
    if contender.package is not None:
        other = OtherProcess(contender, workload, settings)
        return other, other()
    run = prepare(contender, workload, settings)
    with compiling(contender):
        result = run()
    for _ in range(WARM_UP_CALLS):
        run()
    return run, result

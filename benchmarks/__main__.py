"""``python -m benchmarks [CASE ...]``: compares amp_fx with other ways to run a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.comparison import compare
from benchmarks.contenders import BY_NAME, CONTENDERS, Settings
from benchmarks.workloads import BY_DEFAULT, CASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        The exit code: 0 for success, 1 if a contender failed.
    """
    parsed = _parse(argv)
    fields = dataclasses.fields(Settings)
    settings = Settings(**{field.name: getattr(parsed, field.name) for field in fields})
    module = torch.get_device_module(settings.device)  # the CPU has no name, but instructions
    name = getattr(module, "get_device_name", torch.backends.cpu.get_cpu_capability)()
    report = {
        "command": shlex.join(["python", "-m", "benchmarks", *argv]),
        "machine": f"{name}, threads: {torch.get_num_threads()}",
        "torch": torch.__version__,
    }
    sys.stdout.write("".join(f"{name}: {fact}\n" for name, fact in report.items()))
    comparisons = []
    for case in parsed.cases or BY_DEFAULT:
        with settings.device:
            workloads = list(CASES[case]())
        for workload in workloads:
            comparison = compare(workload, settings)
            sys.stdout.write(f"\n{case}: {comparison}\n")
            sys.stdout.flush()
            comparisons.append({"case": case, **comparison.as_json()})
            if parsed.json:
                data = {**report, "comparisons": comparisons}
                parsed.json.write_text(json.dumps(data, indent=1) + "\n")
    return int(any(row["failures"] for row in comparisons))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    cases = "\n".join(f"  {name:<16} {make.__doc__}" for name, make in CASES.items())
    contenders = "\n".join(f"  {c.name:<16} {c.about}" for c in CONTENDERS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares amp_fx with other ways to run a model, in turns in one process. "
        "Tables show medians, and errors relative to the result of eager float32. Ratios are "
        "medians over rounds, with their quartiles.",
        epilog=f"cases:\n{cases}\n\ncontenders:\n{contenders}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, Settings()
    add("cases", nargs="*", metavar="CASE", type=_case, help="default: all but tiny-sweep")
    add("--device", type=_device, default=default.device, help="default: %(default)s")
    add("--dtype", type=_dtype, default=default.dtype, help="bfloat16 or float16")
    add("--contenders", type=_contenders, default=(), help="comma-separated; default: all")
    add("--compiler", choices=("inductor", "aot_eager", "eager"), default=default.compiler)
    add("--repeats", type=int, default=default.repeats, help="rounds; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    return parser.parse_args(argv)


def _case(text: str) -> str:
    return _one_of(CASES, text)


def _contenders(text: str) -> tuple[str, ...]:
    return tuple(_one_of(BY_NAME, name) for name in text.split(","))


def _dtype(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, _one_of(("bfloat16", "float16"), text))
    return dtype


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _one_of(allowed: Iterable[str], name: str) -> str:
    if name not in allowed:
        raise argparse.ArgumentTypeError(f"{name}: expected one of {', '.join(allowed)}")
    return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

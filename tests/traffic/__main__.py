"""``python -m tests.traffic``: counts what the generated kernels of whole models move.

``bytes`` compares native, amp_fx and the limit; ``float8`` compares amp_fx with torchao. Nothing
runs: fake tensors go through Dynamo, autograd, autocast, amp_fx and inductor, for the CPU or for
CUDA, and inductor's scheduler reports what each of its kernels reads and writes. So the models need
neither their memory nor a GPU; code for CUDA needs a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError
from amp_fx.options import as_low_dtype
from tests.traffic import float8
from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import can_pretend
from tests.traffic.totals import Totals
from tests.traffic.worker import CONTENDERS, FROZEN, counted_in_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MODES = {"training": True, "inference": False}
COLUMNS = [field.name for field in dataclasses.fields(Totals)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0; 1 if a contender has no figures.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("bytes", "float8"))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, if possible")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    only = parser.add_argument_group("bytes alone")
    only.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    only.add_argument("--mode", choices=MODES, help="default: both")
    only.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parsed = parser.parse_intermixed_args(argv)
    parsed.device = parsed.device or ("cuda" if can_pretend() else "cpu")
    try:
        parsed.dtype = dtype_name(as_low_dtype(parsed.dtype))
    except OptionError as error:
        parser.error(str(error))
    unknown = [name for name in parsed.cases if name not in CASES]
    if unknown:
        parser.error(f"case {unknown[0]}: not one of {', '.join(CASES)}")
    if parsed.device == "cuda" and not can_pretend():
        parser.error("--device cuda: this torch was built without CUDA or Triton; try cpu")
    if not has_cpp_compiler():
        parser.error("inductor finds no C++ compiler")
    if parsed.command == "float8":
        cases = parsed.cases or float8.SHOWN
        return float8.print_tables(cases, device=parsed.device, is_tiny=parsed.tiny)
    rows = []
    for row in count_models(parsed):
        rows.append(row)
        sys.stdout.write("".join(f"{line}\n" for line in table(row)))
        sys.stdout.flush()
        if parsed.json:
            parsed.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(any(row["failures"] for row in rows))


def count_models(parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the figures of each model and mode.

    ``totals`` has by contender the first call after an update of the weights, which includes the
    refresh of cached values, and under ``"..., further"`` the calls after that. ``failures`` has
    the errors of contenders.
    """
    modes = [parsed.mode] if parsed.mode else MODES
    for case, mode in itertools.product(parsed.cases or CASES, modes):
        # The packed weights of frozen graphs on the CPU are opaque, and cannot be fake.
        is_frozen = parsed.device == "cuda" and mode == "inference"
        contenders = (*CONTENDERS, FROZEN) if is_frozen else CONTENDERS
        answers = counted_in_process(
            case, contenders, parsed.device, parsed.dtype, trains=MODES[mode], tiny=parsed.tiny
        )
        totals: dict[str, Mapping[str, int]] = {}
        failures: dict[str, str] = {}
        for name, answer in answers.items():
            if "error" in answer:
                failures[name] = answer["error"]
            else:
                totals |= {name: answer["first"], f"{name}, further": answer["further"]}
        about = (TINY if parsed.tiny else CASES)[case].about
        row = {"about": about, "device": parsed.device, "dtype": parsed.dtype, "mode": mode}
        yield {**row, "totals": totals, "failures": failures}


def table(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a Markdown table; bytes are in MiB.

    Further calls are left out if they move what the first one moves.
    """
    title = f"{row['about']}, {row['mode']}, {row['dtype']}, {row['device']}"
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield f"|---{'|---:' * len(COLUMNS)}|"
    for name, counted in row["totals"].items():
        if counted == row["totals"].get(name.removesuffix(", further")) and "further" in name:
            continue
        cells = [
            f"{counted[key] / 2**20:.4g}" if "bytes" in key else str(counted[key])
            for key in COLUMNS
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield from (f"{name} failed: {why}" for name, why in row["failures"].items())
    yield ""


if __name__ == "__main__":
    sys.exit(main())

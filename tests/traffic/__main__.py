"""``python -m tests.traffic bytes``: counts what the generated kernels of whole models move.

It compares native, amp_fx and the limit, or the contenders that are asked for. Nothing runs: fake
tensors go through Dynamo, autograd, autocast, amp_fx and inductor, for the CPU or for CUDA, and
inductor's scheduler reports what each of its kernels reads and writes. So the models need neither
their memory nor a GPU; code for CUDA needs a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import can_pretend, pretend_cuda
from tests.traffic.totals import Totals
from tests.traffic.worker import CONTENDERS, FROZEN, POLICIES, TORCHAO, count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MODES = {"training": True, "inference": False}
ALL = sorted({*CONTENDERS, *POLICIES, *TORCHAO})
COLUMNS = [field.name for field in dataclasses.fields(Totals)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; 1 if a contender has no figures.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("bytes",))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, if possible")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--contenders", nargs="+", choices=ALL, help="of these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parsed = parser.parse_intermixed_args(argv)
    parsed.device = parsed.device or ("cuda" if can_pretend() else "cpu")
    known = TINY if parsed.tiny else CASES
    unknown = [name for name in parsed.cases if name not in known]
    if unknown:
        parser.error(f"case {unknown[0]}: not one of {', '.join(known)}")
    warnings.simplefilter("ignore")
    if parsed.device == "cuda":
        pretend_cuda()
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
    dtype = getattr(torch, parsed.dtype)
    cases = TINY if parsed.tiny else CASES
    for name, mode in itertools.product(parsed.cases or cases, modes):
        # The packed weights of frozen graphs on the CPU are opaque, and cannot be fake.
        is_frozen = parsed.device == "cuda" and mode == "inference"
        contenders = parsed.contenders or (*CONTENDERS, *[FROZEN] * is_frozen)
        found: dict[str, dict[str, int]] = {}
        failures: dict[str, str] = {}
        for contender in contenders:
            with recording(contender, failures):
                calls = count(
                    cases[name], contender, device=parsed.device, dtype=dtype, trains=MODES[mode]
                )
                first, further = map(dataclasses.asdict, calls)
                found |= {contender: first, f"{contender}, further": further}
        row = {"about": cases[name].about, "device": parsed.device, "dtype": parsed.dtype}
        yield {**row, "mode": mode, "totals": found, "failures": failures}


@contextlib.contextmanager
def recording(contender: str, failures: dict[str, str]) -> Iterator[None]:
    """Notes the error of a contender, if there is one."""
    try:
        yield
    except Exception as error:  # noqa: BLE001, it is reported
        failures[contender] = f"{type(error).__name__}: {error}".partition("\n")[0]


def table(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a Markdown table; bytes are in MiB.

    Further calls are left out if they move what the first one moves.
    """
    title = f"{row['about']}, {row['mode']}, {row['dtype']}, {row['device']}"
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield f"|---{'|---:' * len(COLUMNS)}|"
    for name, sums in row["totals"].items():
        if sums == row["totals"].get(name.removesuffix(", further")) and "further" in name:
            continue
        cells = [
            f"{sums[key] / 2**20:.4g}" if "bytes" in key else str(sums[key]) for key in COLUMNS
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield from (f"{name} failed: {why}" for name, why in row["failures"].items())
    yield ""


if __name__ == "__main__":
    sys.exit(main())

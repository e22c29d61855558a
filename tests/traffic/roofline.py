"""``python -m tests.traffic roofline FILE``: step times on a GPU by arithmetic, from counted bytes.

Nothing is measured. What is assumed:

- A kernel that inductor generates takes its bytes at 80 % of the memory's bandwidth, and 2 µs at
  least.
- All kernels of libraries together take the longest of three: their bytes at 80 % of the bandwidth,
  their operations at 70 % of the dense peak in bfloat16, and 2 µs each.
- An update is one call after which weights are cast again and further ones, whose gradients are
  added up: 12 bytes a parameter for each further call. A fused AdamW step takes 40 bytes a
  parameter.
- The host is never behind, as under CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.traffic.models import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Counted = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a data sheet says.

    Attributes:
        bandwidth: Of its memory, in bytes per second.
        flops: Dense operations per second in bfloat16.
    """

    bandwidth: float
    flops: float


GPUS = {"h100": Gpu(3.35e12, 990e12), "h200": Gpu(4.8e12, 990e12)}
SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS = 0.8, 0.7
LEAST_SECONDS = 2e-6
STEP_BYTES, SUM_BYTES = 40, 12
"""Per parameter: of a step, of adding up gradients."""


def operations(case: Case, *, trains: bool) -> tuple[int, int]:
    """Operations of the products of one call, with its backward if there is one, and parameters."""
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
        model = case.build()
        inputs: list[torch.Tensor] = [torch.empty(case.shape, requires_grad=trains)]
        if case.num_words:
            inputs.append(torch.empty(case.shape[:-1], dtype=torch.long))
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trains):
            out = model(*inputs)
            if trains:
                out.sum().backward()
        return counter.get_total_flops(), sum(p.numel() for p in model.parameters())


def seconds(counted: Counted, num_operations: int, gpu: Gpu) -> float:
    """What one call takes, with its backward if there is one.

    Args:
        counted: Its ``Totals`` as a dictionary.
        num_operations: Of its products.
        gpu: Where.
    """
    bandwidth = gpu.bandwidth * SHARE_OF_BANDWIDTH
    generated: float = (counted["num_bytes"] - counted["extern_bytes"]) / bandwidth
    libraries: tuple[float, ...] = (
        counted["extern_bytes"] / bandwidth,
        num_operations / (gpu.flops * SHARE_OF_FLOPS),
        counted["num_extern"] * LEAST_SECONDS,
    )
    own: float = max(generated, counted["num_launches"] * LEAST_SECONDS)
    return own + max(libraries)


def update_seconds(
    first: Counted, further: Counted, count: int, work: tuple[int, int], gpu: Gpu
) -> float:
    """What an update of several micro-batches takes, with a fused AdamW step.

    Args:
        first: Of the first call, ``further`` of each other one.
        further: The same dictionary for contenders that keep nothing.
        count: How many micro-batches there are.
        work: Operations of one of them, and parameters.
        gpu: Where.
    """
    num_operations, num_parameters = work
    moved = num_parameters * (STEP_BYTES + SUM_BYTES * (count - 1))
    calls = seconds(first, num_operations, gpu)
    calls += (count - 1) * seconds(further, num_operations, gpu)
    return calls + moved / (gpu.bandwidth * SHARE_OF_BANDWIDTH)


def training_row(row: Mapping[str, Any], case: Case, gpu: Gpu) -> list[float]:
    """Steps relative to native's, of 1, 4 and 16 micro-batches.

    Returns:
        The share of products in native's call; amp_fx with 1, 4 and 16 micro-batches; ``lean`` with
        4.
    """
    work = operations(case, trains=True)
    by_name = row["totals"]
    native, ours, more = (by_name[name] for name in ("native", "amp_fx", "amp_fx, further"))
    lean = by_name["lean"]
    # What lean needs not do in further calls is what the refresh took.
    lean_more = {**lean, "num_bytes": lean["num_bytes"] - ours["num_bytes"] + more["num_bytes"]}
    alone = {n: update_seconds(native, native, n, work, gpu) for n in (1, 4, 16)}
    products = max(work[0] / (gpu.flops * SHARE_OF_FLOPS), native["num_extern"] * LEAST_SECONDS)
    return [
        products / seconds(native, work[0], gpu),
        *(update_seconds(ours, more, n, work, gpu) / alone[n] for n in (1, 4, 16)),
        update_seconds(lean, lean_more, 4, work, gpu) / alone[4],
    ]


def inference_row(row: Mapping[str, Any], case: Case, gpu: Gpu) -> list[float]:
    """A call of amp_fx relative to native's, where weights were not written since the last one."""
    num_operations, _ = operations(case, trains=False)
    by_name = row["totals"]
    times = [seconds(by_name[n], num_operations, gpu) for n in ("native", "amp_fx, further")]
    return [1e6 * times[0], times[1] / times[0]]


TITLES = {
    "training": "share of products | 1 micro-batch | 4 | 16 | `lean`, 4",
    "inference": "native, µs | amp_fx / native",
}


def main(argv: Sequence[str]) -> int:
    """Prints tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.traffic roofline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="what `bytes --json` wrote, for CUDA")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    given = parser.parse_args(argv)
    try:
        rows = json.loads(given.file.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{given.file} cannot be read as what `bytes --json` writes: {error}")
    cases = {case.about: case for case in CASES.values()}
    for mode, fill in (("training", training_row), ("inference", inference_row)):
        title = TITLES[mode]
        lines = [f"| {given.gpu}, {mode} | {title} |", "|---" * (title.count("|") + 2) + "|"]
        for row in rows:
            if row["mode"] == mode and row["device"] == "cuda" and row["about"] in cases:
                found = fill(row, cases[row["about"]], GPUS[given.gpu])
                numbers = " | ".join(f"{x:.0f}" if x > 10 else f"{x:.2f}" for x in found)
                lines.append(f"| {row['about']} | {numbers} |")
        sys.stdout.write("\n".join(lines) + "\n\n")
    return 0

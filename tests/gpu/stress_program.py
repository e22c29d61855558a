"""Threads that call one compiled model while another writes it; exits with 1 for a wrong number.

Run in a separate process, because the faults that it looks for may abort the process::

    python -X faulthandler -m tests.gpu.stress_program --seconds 5 --device cpu

All numbers of the model are positive, so that every output rises with every element of every
weight. A weight version scales whole weights by powers of two, so that the output identifies the
version of each use of a weight: the exponent of its ratio to the first version's output is
``3 e + e + 9 h``, with the version's ``e`` of the embedding, the same for the tied head, and ``h``
of the hidden layer.

A call that no write overlaps must give the newest version. One that a write overlaps may see
any element old or new (native calls do), so that the output is between the two.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


VOCABULARY, SIZE = 96, 64
NUM_READERS = 8
NUM_VERSIONS = 3
MAX_FAILURES = 5

TOLERANCE = 2.0**-5
"""Relative. The compiled and the eager program round at most four times each to bfloat16, by
2^-8 at most, and sums of positive terms do not amplify that. Versions differ by 2 or more."""


class Tied(nn.Module):
    """An embedding, a hidden layer, and a head that is the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.hidden = nn.Linear(SIZE, SIZE, bias=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            # Few bits: factors of 2^18 - 1 stay exact in float32, too.
            eighths = torch.randint(1, 8, parameter.shape, generator=generator)
            parameter.data.copy_(eighths / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.embedding(x) ** 3)
        return functional.linear(hidden, self.embedding.weight)


def exponent(version: int) -> int:
    """Returns the exponent of the ratio of a version's output to the first version's."""
    return (3 + 1 + 9) * (version % NUM_VERSIONS)


class Versions:
    """The version that is current, and odd counts while the next is being written."""

    def __init__(self, model: Tied) -> None:
        self.model = model
        self.count = 0

    def publish(self) -> None:
        """Writes the next version."""
        old, new = (v % NUM_VERSIONS for v in (self.count // 2, self.count // 2 + 1))
        self.count += 1
        self.model.embedding.weight.data.mul_(2.0 ** (new - old))
        self.model.hidden.weight.data.mul_(2.0 ** (9 * (new - old)))
        self.count += 1

    @staticmethod
    def expected(before: int, after: int) -> tuple[int, int]:
        """The least and the greatest exponent of what a call between two counts may give."""
        exponents = [exponent(v) for v in range(before // 2, (after + 1) // 2 + 1)]
        return min(exponents), max(exponents)


class Run:
    """Threads, and what went wrong in them."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.failures: list[str] = []
        self.counts = {"calls": 0, "undisturbed": 0, "writes": 0}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def has_time(self) -> bool:
        return time.monotonic() < self.end and len(self.failures) < MAX_FAILURES

    def count(self, **counts: int) -> None:
        with self._lock:
            for name, number in counts.items():
                self.counts[name] += number

    def start(self, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001
                self.failures.append(f"{type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=guarded))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@torch.no_grad()
def serve(
    run: Run, compiled: Any, versions: Versions, x: torch.Tensor, first: torch.Tensor
) -> None:
    """Calls until the end, and compares every output with the first version's."""
    while run.has_time():
        before = versions.count
        out = compiled(x)
        after = versions.count
        least, greatest = versions.expected(before, after)
        ratio = out / first
        low, high = ratio.min().item(), ratio.max().item()
        is_right = low >= 2.0**least * (1 - TOLERANCE) and high <= 2.0**greatest * (1 + TOLERANCE)
        if not is_right:
            run.failures.append(
                f"output is 2**{math.log2(low):.3g} to 2**{math.log2(high):.3g} times the first "
                f"version's, not 2**{least} to 2**{greatest}, between counts {before} and {after}"
            )
        run.count(calls=1, undisturbed=int(before == after and before % 2 == 0))


def reference(model: Tied, x: torch.Tensor) -> torch.Tensor:
    """Runs the model with its current weights in eager autocast."""
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        return model(x).float()  # type: ignore[no-any-return]


def read_and_write(run: Run, compiled: Any, model: Tied) -> None:
    """Starts eight readers, and writes until two seconds before they stop."""
    versions = Versions(model)
    firsts = [reference(model, inputs(k, model)) for k in range(NUM_READERS)]
    for k, first in enumerate(firsts):
        run.start(functools.partial(serve, run, compiled, versions, inputs(k, model), first))
    while run.has_time() and time.monotonic() < run.end - 2:
        versions.publish()
        run.count(writes=1)
        time.sleep(0.01)
    run.join()


def inputs(seed: int, model: Tied) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return tokens.to(model.embedding.weight.device)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    model = Tied().to(arguments.device)
    compiled = torch.compile(model, backend="amp_fx", options={"freezing": False}, dynamic=False)
    for i in range(16):  # calls that follow a write each, then unchanged ones: both variants
        with torch.no_grad():
            compiled(inputs(0, model))
        for parameter in model.parameters() if i < 8 else ():
            parameter.data.mul_(1.0)
    faulthandler.dump_traceback_later(arguments.seconds + 45, exit=True)  # a deadlock
    run = Run(arguments.seconds)
    read_and_write(run, compiled, model)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(json.dumps(run.counts) + "\n")
    sys.stderr.write("\n".join(run.failures[:MAX_FAILURES]))
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())

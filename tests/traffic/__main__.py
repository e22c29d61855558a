"""``python -m tests.traffic``: what the generated kernels move, counted.

``bytes`` counts whole models, ``float8`` models in float8, beside torchao; ``roofline`` calculates
step times from counted bytes. Nothing runs, except in ``time``, which times the same models on a
GPU. Fake tensors go through Dynamo, autograd, autocast, amp_fx and inductor, for the CPU or for
CUDA; inductor's scheduler is asked what each of its kernels reads and writes. So neither the memory
of the models nor a GPU is needed, for CUDA only a build of torch that has it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.traffic import command, float8, roofline, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "bytes": command.main,
    "roofline": roofline.main,
    "float8": float8.main,
    "time": timed.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code; 2 for one that does not exist."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in COMMANDS:
        sys.stderr.write(f"usage: python -m tests.traffic {{{','.join(COMMANDS)}}} [--help]\n")
        return 2
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main())

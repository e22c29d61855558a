"""A rank that calls a model after it asked for a weight, and before the weight comes.

Run by ``tests.distributed.spawn``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from amp_fx import weight_cache
from tests.weights.keeping import WAYS, batch, contents, is_right, make_line

SENDER = 0


def received(rank: int) -> dict[str, bool]:
    """By the name of the way of keeping, whether calls after the last byte were right."""
    folder, x = Path(sys.argv[3]), batch()
    is_all_right = {}
    for way in WAYS:
        torch._dynamo.reset()
        weight_cache.clear()
        model, held = make_line()
        program = way.compile(model)
        for _ in range(4):
            way.call(program, x)
        rights = []
        for k in range(3):
            new, called = contents(70 + k), folder / f"{way.name}-{k}"
            if rank == SENDER:
                wait_for(called)
                model.weight(1).data.copy_(new)
                dist.broadcast(model.weight(1).data, SENDER)
            else:
                work = dist.broadcast(model.weight(1).data, SENDER, async_op=True)
                time.sleep(0.2)  # the thread of gloo takes its pointer
                rights += [is_right(way, program, held, x) for _ in range(k + 1)]
                called.touch()
                work.wait()
            held[1] = new
            rights += [is_right(way, program, held, x) for _ in range(2)]
        is_all_right[way.name] = all(rights)
    return is_all_right


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, "the other rank did not come to its call"
        time.sleep(0.01)

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
from tests.weights.keeping import WAYS, Line, batch, contents

SENDER = 0


def received(rank: int) -> bool:
    """Checks calls before the last byte has come, and after it."""
    folder, x = Path(sys.argv[3]), batch()
    for way in WAYS:
        torch._dynamo.reset()
        weight_cache.clear()
        model = Line()
        program = way.compile(model)
        way.warm(program, x)
        for k in range(3):
            called = folder / f"{way.name}-{k}"
            if rank == SENDER:
                wait_for(called)
                model.weight(1).data.copy_(contents(70 + k))
                dist.broadcast(model.weight(1).data, SENDER)
            else:
                work = dist.broadcast(model.weight(1).data, SENDER, async_op=True)
                time.sleep(0.2)  # the thread of gloo takes its pointer
                for _ in range(k + 1):
                    way.check(program, model, x)
                called.touch()
                work.wait()
                assert torch.equal(model.weight(1), contents(70 + k))
            for _ in range(2):
                way.check(program, model, x)
    return True


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, "the other rank did not come to its call"
        time.sleep(0.01)

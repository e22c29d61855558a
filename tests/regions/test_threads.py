"""Eager kernels of ours next to other threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from amp_fx.backend.inner import has_cpp_compiler

PROGRAM = """
import threading
import torch
import amp_fx
import amp_fx.policies.policy
from amp_fx import CastPolicy
from torch.nn import functional

table = {**amp_fx.policies.policy.preset("torch").tables["cpu"], "aten::linear": CastPolicy.FP32}
policy = amp_fx.policies.policy.preset("torch").with_device("cpu", table)
casting, waiting = threading.Event(), threading.Event()


class Slow(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._to_copy.default and not casting.is_set():
            casting.set()  # with the mutex of the cache of casts
            waiting.wait()
            for _ in range(1000):
                threading.Event().wait(0.0002)  # the other has long asked for it
        return op(*[a.inner if isinstance(a, Slow) else a for a in args], **(kwargs or {}))


x, weight = torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)
slow = Slow(torch.randn(4, 4)).requires_grad_()
with amp_fx.autocast("cpu", torch.bfloat16, policy=policy):
    functional.linear(x, weight)  # which replaces the kernel of linear


def cast():
    with torch.autocast("cpu", torch.bfloat16):
        torch.mm(x, slow)


def call():
    casting.wait()
    with torch.autocast("cpu", torch.bfloat16):
        waiting.set()
        functional.linear(x, weight)


threads = [threading.Thread(target=each, daemon=True) for each in (cast, call)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
print("alive" if any(thread.is_alive() for thread in threads) else "done", flush=True)
"""


@pytest.mark.skipif(not has_cpp_compiler(), reason="kernels.cpp cannot be built")
def test_a_kernel_that_waits_for_the_cache_of_casts_holds_nobody_up() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.stdout == "done\n", run.stderr

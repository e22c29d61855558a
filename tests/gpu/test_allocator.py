"""Kept casts where CUDA's memory comes from another allocator (``parts.py`` sets the variable)."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from amp_fx import weight_cache
from tests.gpu.place import DEVICE, MARKS, ON_A_GPU
from tests.weights.nets import SIZE, assert_same, make_net, random

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GIVEN = next(filter(None, map(os.environ.get, SETTINGS)), "")

pytestmark = [*MARKS, pytest.mark.skipif(not GIVEN, reason=f"needs {SETTINGS[0]}")]


@ON_A_GPU
def test_memory_comes_from_the_allocator_that_was_asked_for() -> None:
    weight = torch.ones(2**22, device=DEVICE)
    if asked := re.search(r"backend:(\w+)", GIVEN):
        assert torch.cuda.get_allocator_backend() == asked[1]
    if "expandable_segments:True" in GIVEN:
        segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        assert any(
            s["is_expandable"] and 0 <= weight.data_ptr() - s["address"] < s["total_size"]
            for s in segments
        )


def test_copies_follow_writes_while_weights_come_and_go() -> None:
    """Models die, and other weights lie where theirs lay."""
    options: Any = {"compiler": "aot_eager", "dtype": "bf16", "fallback": False}
    options["weight_cache"] = "training"
    x = random(3, SIZE).to(DEVICE)
    for seed in range(6):
        net, twin = (make_net(seed).to(DEVICE) for _ in range(2))
        compiled = torch.compile(net, backend="amp_fx", options=options, dynamic=False)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (net, twin)]
        for _ in range(3):
            out = compiled(x)
            with torch.autocast(DEVICE, torch.bfloat16):
                expected = twin(x)
            assert_same(out, expected.float())
            for result, optimizer in zip((out, expected), optimizers, strict=True):
                optimizer.zero_grad()
                result.float().square().mean().backward()
                optimizer.step()
        torch._dynamo.reset()
        del net, twin, compiled, optimizers, optimizer, out, expected, result
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    assert weight_cache.stats().entries == 0

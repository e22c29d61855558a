"""Cached casts in memory of CUDA's other allocators, each in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import weight_cache
from tests.gpu.place import DEVICE, MARKS, ON_A_GPU
from tests.weights.nets import SIZE, assert_same, make_net, random

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GIVEN = next(filter(None, map(os.environ.get, SETTINGS)), "")

pytestmark = MARKS
UNDER_A_SETTING = pytest.mark.skipif(not GIVEN, reason=f"needs {SETTINGS[0]}")
MEMORY_TESTS = (
    "tests/gpu/test_allocator.py",
    "tests/gpu/test_writes.py::test_a_weight_is_held_for_the_stream_that_reads_it",
    "tests/gpu/test_frozen.py::test_what_the_user_captures_makes_its_values_anew",
    "tests/gpu/test_frozen.py::test_values_made_on_one_stream_are_waited_for_on_another",
)
GRAPH_TEST = (
    "tests/gpu/test_captures.py::test_graphs_are_recorded_once_and_casts_made_once_per_write"
)


@ON_A_GPU
@pytest.mark.skipif(bool(GIVEN), reason=f"{SETTINGS[0]} is set already")
@pytest.mark.parametrize(
    ("setting", "tests"),
    [
        ("expandable_segments:True", (*MEMORY_TESTS, GRAPH_TEST)),
        ("backend:cudaMallocAsync", MEMORY_TESTS),
    ],
)
def test_tests_of_memory_pass_with_another_allocator(setting: str, tests: Sequence[str]) -> None:
    """Sets the variable's old name, which torch still reads after it renamed it in 2.9."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "", *tests]
    command += ["-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    environment = {**os.environ, SETTINGS[0]: setting}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


@ON_A_GPU
@UNDER_A_SETTING
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


@UNDER_A_SETTING
def test_copies_follow_writes_while_weights_come_and_go() -> None:
    """Frees models, so that later weights reuse their memory."""
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

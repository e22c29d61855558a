"""``python -m tests.traffic float8``: ours moves no more than compiled torchao, and compiles."""

from __future__ import annotations

import pytest

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.tables.float8 import RECIPES
from tests.traffic.__main__ import main
from tests.traffic.float8 import contenders, count, float8_operations
from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import can_pretend

pytest.importorskip("torchao", reason="the other one is torchao 0.18")
pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.skipif(not can_pretend(), reason="needs a CUDA build with Triton")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_more_than_compiled_torchao(name: str, recipe: str) -> None:
    """Bytes, kernels, and what is saved for the backward, once the weights are quantized."""
    theirs, ours = count(name, contenders(recipe), device="cuda", is_tiny=False).values()
    kernels, most = (w.further.num_launches + w.further.num_extern for w in (ours, theirs))
    assert kernels <= most
    assert ours.further.num_bytes <= theirs.further.num_bytes
    assert ours.further.saved_bytes <= theirs.further.saved_bytes
    assert ours.failures == {}  # for sm_90


def test_operations_in_float8_by_hand() -> None:
    """The MLP has two products, which are the first and the last; GPT-2's blocks have more."""
    assert float8_operations(CASES["mlp"], "rowwise") == 0
    width, rows = 32, 2 * 16
    weights = 2 * (width * 3 * width + width * width + 2 * width * 4 * width)
    ends = width * 3 * width + width * 4 * width
    forward = 2 * rows * (weights - ends)
    assert float8_operations(TINY["gpt2"], "rowwise") == 3 * forward
    assert float8_operations(TINY["gpt2"], "rowwise-gw-hp") == 2 * forward


@pytest.mark.slow
def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["float8", "gpt2", "--tiny", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("GPT-2 d32" in line for line in lines) == 2 * len(RECIPES)

"""``python -m tests.traffic float8``: amp_fx moves no more than compiled torchao."""

from __future__ import annotations

import pytest

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.tables.float8 import RECIPES
from tests.traffic.__main__ import main
from tests.traffic.float8 import contenders, count
from tests.traffic.pretend import can_pretend

pytest.importorskip("torchao", reason="the other one is torchao 0.18")
pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.skipif(not can_pretend(), reason="needs a CUDA build with Triton")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_more_than_compiled_torchao(name: str, recipe: str) -> None:
    """Compares bytes, kernels, and saved bytes after the weights are quantized."""
    counted = count(name, contenders(recipe), device="cuda", is_tiny=False)
    theirs, ours = (further for _, further in counted.values())
    kernels, most = (w.num_launches + w.num_extern for w in (ours, theirs))
    assert kernels <= most
    assert ours.num_bytes <= theirs.num_bytes
    assert ours.saved_bytes <= theirs.saved_bytes


@pytest.mark.slow
def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["float8", "gpt2", "--tiny", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("GPT-2 d32" in line for line in lines) == len(RECIPES)

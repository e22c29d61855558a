"""Ahead of time: compiled and saved in one process, called in another, with casts kept.

Relies on ``torch._dynamo.aot_compile`` taking a ``SerializableCallable`` for what a backend gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.backend.ahead import is_ahead_of_time
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.errors import UnsupportedError
from tests.ahead_program import Net

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")

LOAD = """
import sys
import torch
import amp_fx
from tests.ahead_program import Net

model, x = Net(), torch.load(sys.argv[2] + "/x")
model.load_state_dict(torch.load(sys.argv[2] + "/state"))
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "region"):
    with open(sys.argv[2] + "/saved", "rb") as file:
        program = torch.compiler.load_compiled_function(file)
    assert torch.equal(program(model, x), torch.load(sys.argv[2] + "/before"))
    model.first.weight.mul_(2)
    assert torch.equal(program(model, x), torch.load(sys.argv[2] + "/after"))
    assert not amp_fx.weight_cache.stats().entries, "saved graphs cast in every call"
"""


@pytest.mark.slow
def test_saved_in_a_region_and_called_in_another_process(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(4, 32)
    torch.save(x, tmp_path / "x")
    torch.save(model.state_dict(), tmp_path / "state")
    compiled: Any = torch.compile(model, backend="amp_fx", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        program = compiled.forward.aot_compile(((x,), {}))
        program.save_compiled_function(tmp_path / "saved")
        before = program(model, x)
        tolerance = 4 * torch.finfo(torch.bfloat16).eps  # fused kernels round less
        torch.testing.assert_close(before, model(x), rtol=tolerance, atol=tolerance)
        torch.save(before, tmp_path / "before")
        model.first.weight.mul_(2)
        torch.save(program(model, x), tmp_path / "after")
    assert not is_ahead_of_time()
    command = [sys.executable, "-c", LOAD, "region", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_no_compiler_can_save_is_an_error_that_says_so() -> None:
    x = torch.randn(4, 32)
    compiled: Any = torch.compile(
        Net(), backend="amp_fx", fullgraph=True, options={"compiler": "eager"}
    )
    with pytest.raises(UnsupportedError, match="what inductor compiles"), torch.no_grad():
        compiled.forward.aot_compile(((x,), {}))

"""Bytes that an explanation tells, against what eager runs of the same program move."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from tests import needs
from tests.models.explained import CASES, mlp

if TYPE_CHECKING:
    from pathlib import Path


CACHED = {"weight_cache": "training"}
"""Casts of weights are cached in graphs with gradients too."""


def size(tensor: torch.Tensor) -> int:
    """Memory that a real tensor's elements lie in."""
    whole = tensor.as_strided(
        [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)],
        tensor.stride(),
    )
    return whole.numel() * whole.element_size()


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that casts of eager code read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.moved += size(args[0]) + size(result)
        return result


@pytest.mark.one_in(3)
@needs.HOOK
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_casts_are_those_of_eager_autocast(name: str) -> None:
    """Counts the inserted casts before they are shared and cached."""
    make, args = CASES[name]
    model = make()
    with torch.set_grad_enabled(name in ("mlp", "unet")):
        explanation = amp_fx.explain(model, dtype=torch.bfloat16, options=CACHED)(*args)
        with torch.autocast("cpu", torch.bfloat16), Ledger() as ledger:
            model(*args)
    casts = [cast for cast in explanation.casts if cast.wanted_by != "output"]
    assert sum(cast.bytes_moved for cast in casts) == ledger.moved
    assert explanation.totals.bytes_saved > 0


def test_a_model_on_meta_for_a_device_that_is_not_there() -> None:
    """Compares figures with those of a real model; on CUDA, norms and losses are in float32."""
    with torch.device("meta"):
        model, x = mlp(), torch.zeros(8, 16)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_type": "cuda", "backward": True}
    meta = amp_fx.explain(model, **options)(x)
    real = amp_fx.explain(mlp(), **options)(torch.zeros(8, 16))
    assert meta.totals == real.totals
    assert meta.backward_totals == real.backward_totals


NO_COMPILER_RUNS = """
import sys, torch
started = []
def note(event, arguments):
    if event == "subprocess.Popen":
        started.append(" ".join(map(str, arguments[1])))
sys.addaudithook(note)
import amp_fx
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
with torch.no_grad():
    totals = amp_fx.explain(model)(torch.randn(8, 16)).totals
amp_fx.explain(model, backward=True)(torch.randn(8, 16))
print(totals.casts_cached, [words for words in started if ".cpp" in words])
"""


@pytest.mark.slow
@needs.HOOK
def test_nothing_is_compiled(tmp_path: Path) -> None:
    """In fresh caches neither the part that watches weights is built nor a kernel."""
    folders = {
        name: str(tmp_path / name) for name in ("AMP_FX_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    command = [sys.executable, "-c", NO_COMPILER_RUNS]
    env = {**os.environ, **folders}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2 []\n", "")
    assert not list(tmp_path.rglob("*.so"))

"""Casts of ONNX files: each has a reason in the dtypes or numbers of eager autocast."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.passes.base import PassResult
from amp_fx.passes.reuse_casts import ReuseCasts

if TYPE_CHECKING:
    from pathlib import Path

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.exporting.superfluous_casts import superfluous_casts  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:Mismatch dtype"
)


class Rotary(nn.Module):
    """Attention with rotated queries and a float32 residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(8), nn.Linear(8, 8)
        self.angles = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(self.norm(x))
        rotated = torch.cat([-q[..., 4:], q[..., :4]], -1)
        q = q * self.angles.cos() + rotated * self.angles.sin()
        result: Tensor = x + torch.softmax(q @ q.mT, -1) @ q
        return result


class Images(nn.Module):
    """Images as sequences, and resized images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(nn.functional.interpolate(self.conv(x), scale_factor=2.0))
        sequence = self.norm(y.flatten(2).mT)
        images = self.out(sequence.mT.reshape(y.shape))
        result: Tensor = self.linear(sequence) + images.flatten(2).mT
        return result


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "rotary": (Rotary, (2, 4, 8)),
    "images": (Images, (2, 3, 4, 4)),
}


def file(name: str, dtype: torch.dtype, folder: Path) -> tuple[Any, Tensor]:
    torch.manual_seed(1234)
    kind, shape = CASES[name]
    model, x = kind().eval(), torch.randn(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    program = amp_fx.export(model, (x,), device_type="cuda", dtype=dtype)
    path = amp_fx.to_onnx(program, folder / "model.onnx", target="tensorrt")
    return onnx.load(path), x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_no_cast_is_superfluous(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = file(name, dtype, tmp_path)
    assert superfluous_casts(model, x) == []


@pytest.mark.parametrize("name", CASES)
def test_superfluous_casts_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReuseCasts, "call", lambda _, __: PassResult(collections.Counter()))
    model, x = file(name, torch.float16, tmp_path)
    assert superfluous_casts(model, x)

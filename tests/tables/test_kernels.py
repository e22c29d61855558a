"""Each row of the table of opaque kernels, measured: the op called with autocast on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.tables.kernels import LOW, OPAQUE_KERNELS, opaque_result
from amp_fx.tables.presets import torch_version

if TYPE_CHECKING:
    from collections.abc import Callable


def trilinear(x: torch.Tensor) -> Any:
    return torch.nn.functional.bilinear(x, x, x.expand(3, 16, 16))


def scaled_mm(x: torch.Tensor) -> Any:
    scale = torch.ones(())
    low = x.to(torch.float8_e4m3fn)
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # with AMX, oneDNN multiplies float8: no cast inside
    try:
        return torch._scaled_mm(low, low.t(), scale, scale, out_dtype=torch.float32)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def scaled_mm_v2(x: torch.Tensor) -> Any:
    scale = torch.ones(())
    low = x.to(torch.float8_e4m3fn)
    tensorwise = [torch.nn.functional.ScalingType.TensorWise.value]
    return torch._scaled_mm_v2(
        low, low.t(), [scale], tensorwise, [0], [scale], tensorwise, [0], None, torch.float32
    )


def encoder_layer(x: torch.Tensor) -> Any:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    return layer(x[None])


def affine_grid(x: torch.Tensor) -> Any:
    return torch.nn.functional.affine_grid(
        x[:, :6].reshape(16, 2, 3), [16, 1, 4, 4], align_corners=False
    )


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "aten::_trilinear": trilinear,
    "aten::_scaled_mm": scaled_mm,
    "aten::_scaled_mm_v2": scaled_mm_v2,
    "aten::_euclidean_dist": lambda x: torch._euclidean_dist(x, x.flip(0)),
    "aten::affine_grid_generator": affine_grid,
    "aten::linalg_pinv.atol_rtol_tensor": torch.linalg.pinv,
    "aten::linalg_polar": lambda x: torch.linalg.polar(x)[0],  # type: ignore[attr-defined]
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
}


@pytest.mark.parametrize("op", [op for op in OPAQUE_KERNELS if opaque_result(op, "cpu")])
def test_autocast_acts_inside_the_kernel(op: str, rng: torch.Generator) -> None:
    if op == "aten::linalg_polar" and torch_version() < (2, 15):
        pytest.skip("is new in torch 2.15")
    x = torch.randn(16, 16, generator=rng)
    with torch.no_grad():
        torch.manual_seed(0)
        off = CALLS[op](x)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            on = CALLS[op](x)
    assert not torch.equal(on.float(), off.float())
    assert (on.dtype == torch.bfloat16) == (opaque_result(op, "cpu") == LOW)

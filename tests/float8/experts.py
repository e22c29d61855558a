"""Experts in float8: a kernel for the host, and torchao's grouped product as the oracle."""

from __future__ import annotations

import contextlib
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def kernel_for_cpu() -> Iterator[None]:
    """Has ``torch._scaled_grouped_mm`` run on the CPU, which torch has no kernel for."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_grouped_mm", scaled_grouped_mm, "CPU")
    try:
        yield
    finally:
        library._destroy()


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # noqa: ARG001
) -> Tensor:
    """What CUDA's kernel computes, with what it asks for: see ``_scaled_grouped_mm_cuda``."""
    asked = (
        a.stride(-1) == b.stride(-2) == 1,
        not any(size % 16 for size in (a.shape[-1], *b.shape[-2:])),
        bias is None and scale_result is None,
        out_dtype in (None, torch.bfloat16),
        scale_a.is_contiguous() and scale_b.is_contiguous(),
        (offs is None) == (a.dim() == b.dim() == 3),
    )
    assert all(asked), asked
    ends = [] if offs is None else offs.tolist()
    ranges = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
    a_wide, b_wide = a.float(), b.float()
    if a.dim() == b.dim() == 2:
        assert all(r.start % 16 == r.stop % 16 == 0 for r in ranges), "kernels want multiples"
        factors = scale_a.view(len(ends), -1, 1) * scale_b.view(len(ends), 1, -1)
        products = [a_wide[:, r] @ b_wide[r] for r in ranges]
        return (torch.stack(products) * factors).bfloat16()
    if a.dim() == 3:
        return (a_wide @ b_wide * scale_a[..., None] * scale_b[:, None]).bfloat16()
    result = a_wide.new_full((a.shape[0], b.shape[-1]), torch.nan)
    for number, r in enumerate(ranges):
        factors = scale_a[r, None] * scale_b[number]
        result[r] = a_wide[r] @ b_wide[number] * factors
    return result.bfloat16()


def torchaos(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Torchao's product of ``[rows, inputs]`` and ``[experts, outputs, inputs]``."""
    from torchao.prototype.moe_training import fp8_grouped_mm

    product = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm
    result: Tensor = product(x, weight.mT, ends, pad_token_groups_for_grouped_mm=False)
    return result


def quantize_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torchao quantize by its own functions of torch, which its kernels are tested against."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if find_spec("triton"):  # Triton 3.8 refuses how kernels of torchao 0.18 are declared
            patch.setattr("triton.autotune", lambda *_, **__: lambda kernel: kernel)
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
        from torchao.prototype.moe_training import fp8_grouped_mm, utils

    def along(x: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scales = tensor_to_scale(
            x,
            dtype,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=dim,
            round_scales_to_power_of_2=True,
        )
        return to_fp8_saturated(x.to(torch.float32) * scales, dtype), scales

    def rows(x: Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
        return along(x, -1, output_dtype)

    def columns(x: Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
        return along(x, -2, output_dtype)

    def turned(x: Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
        data, scales = utils.torch_to_3d_rowwise_float8_transpose_rhs(x, output_dtype, True)
        return data, scales

    def both(left: Tensor, right: Tensor, ends: Tensor, dtype: Any, **_: Any) -> tuple[Any, ...]:
        found: list[Tensor] = []
        for x in (left, right):
            data, scales = utils.torch_to_float8_per_group_colwise(x, ends, dtype, True)
            found += [data.t().contiguous().t(), scales]
        return tuple(found)

    for name, function in {
        "triton_fp8_rowwise_2d_scale_and_cast": rows,
        "triton_fp8_colwise_3d_scale_and_cast": columns,
        "triton_fp8_rowwise_3d_transpose_rhs": turned,
        "triton_fp8_per_group_colwise_scales_dual": both,
    }.items():
        monkeypatch.setattr(fp8_grouped_mm, name, function)

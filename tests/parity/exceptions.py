"""Table of the ops and models that are known not to match eager autocast, with reasons.

A test in this table is a strict expected failure, so a row that has become wrong fails the suite.
"""

from __future__ import annotations

import pytest
import torch

_NO_CUDA = "it runs as an opaque node, whose torch.autocast turns itself off where there is no CUDA"

DTYPES_ONLY = {
    "empty": "returns whatever lies in memory",
    "new_empty": "returns whatever lies in memory",
    "linalg.lstsq": "LAPACK's driver rounds by where in memory its input lies",
}
"""Start of an op's name -> why no two runs of it give the same numbers, in eager mode too."""

CPU_OPS: dict[str, str] = {}
"""Test id in ``test_ops_cpu.py`` (as ``matmul-bare-float16``) -> reason."""

_OPAQUE_WITHOUT_CUDA = {
    "masked_logsumexp-ambient-float16": _NO_CUDA,
    "masked_logsumexp-bare-bfloat16": _NO_CUDA,
    "masked_prod-ambient-float16": _NO_CUDA,
}
_LOW_RESULT = "the real kernel's last product is autocast, which its fake kernel does not know"
_WIDE_RESULT = (
    "the real kernel calls an op that autocast has in float32, which its fake kernel does not know;"
    " tests/cuda executes it and compares the bits"
)
_FAKE_KERNELS = {
    "linalg_pinv-ambient-float16": _LOW_RESULT,
    "linalg_pinv_hermitian-ambient-float16": _LOW_RESULT,
    "pinverse-ambient-float16": _LOW_RESULT,
    "ldexp-ambient-float16": _WIDE_RESULT,
    "mvlgamma_mvlgamma_p_1-ambient-float16": _WIDE_RESULT,
    "mvlgamma_mvlgamma_p_3-ambient-float16": _WIDE_RESULT,
    "mvlgamma_mvlgamma_p_5-ambient-float16": _WIDE_RESULT,
    "torch_ops_aten__safe_softmax_default-ambient-float16": _WIDE_RESULT,
}
CUDA_OPS: dict[str, str] = _FAKE_KERNELS | (
    {} if torch.cuda.is_available() else _OPAQUE_WITHOUT_CUDA
)
"""Test id in ``test_ops_cuda.py`` -> reason."""

_OPAQUE_CAST = (
    "the transform runs as an opaque node, whose cast of the weight is its own: gradients add up in"
    " float32, where one eager region adds them in the low dtype"
)
MODELS: dict[str, str] = {
    f"vmap-{way}-{dtype}": _OPAQUE_CAST
    for way in ("ambient", "bare")
    for dtype in ("bfloat16", "float16")
}
"""Test id in ``test_models.py`` (as ``lstm_cell-ambient-bfloat16``) -> reason."""

_SAME_TENSOR = (
    "eager autocast casts query, key and value of _native_multi_head_attention three times, and the"
    " kernel of CUDA has a slower way for three tensors than for one; amp_fx casts them once"
)
GPU_MODELS: dict[str, str] = MODELS | {
    f"transformer_encoder_eval-bare-{dtype}": _SAME_TENSOR for dtype in ("bfloat16", "float16")
}
"""Test id in ``tests/gpu/test_parity_models.py``, on a GPU that is not emulated -> reason."""


def param(
    table: dict[str, str],
    *values: object,
    id: str,  # noqa: A002
    is_slow: bool = False,
) -> object:
    """A ``pytest.param`` that is a strict expected failure if ``table`` has a row for ``id``."""
    marks = [pytest.mark.xfail(strict=True, reason=table[id])] if id in table else []
    return pytest.param(*values, id=id, marks=[*marks, *[pytest.mark.slow] * is_slow])

"""Ops without a policy whose kernels call ops with a policy.

Eager autocast also casts for ops that a kernel calls, where passes cannot insert casts. Such ops
run under native autocast, unless ``graphs/decomposed_kernels.py`` has a traceable version. The
table was measured by calling every op of ``op_db`` with autocast on and off: on the CPU, and for
CUDA with emulated kernels (``tests/cuda``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LOW, FLOAT32, KNOWN = "low", "float32", "known"
"""Dtype of a result: the low dtype, float32, or the dtype that the op's fake kernel returns."""

_ANY = "any other"

_RESULTS: Mapping[str, Mapping[str, str]] = {
    # torch.nn.functional.bilinear: calls bmm, and sums in the inputs' dtype
    "aten::_trilinear": {_ANY: KNOWN},
    # the CPU kernels emulate the scaled product: matmul, then a cast to the requested dtype
    "aten::_scaled_mm": {_ANY: KNOWN},
    "aten::_scaled_mm_v2": {_ANY: KNOWN},
    # returns the result of a matmul
    "aten::_euclidean_dist": {_ANY: LOW},
    # torch.nn.functional.affine_grid: returns the result of a bmm
    "aten::affine_grid_generator": {_ANY: LOW},
    # torch.linalg.pinv: returns the product of U, 1/S and V
    "aten::linalg_pinv.atol_rtol_tensor": {_ANY: LOW},
    # torch.linalg.polar, since torch 2.15: products of an SVD's factors, in the input's dtype
    "aten::linalg_polar": {_ANY: KNOWN},
    # call pow, sum and softmax, which are float32 in CUDA's table
    "aten::ldexp.Tensor": {"cuda": FLOAT32},
    "aten::mvlgamma": {"cuda": FLOAT32},
    "aten::_safe_softmax": {"cuda": FLOAT32},
    # calls index_put, whose arguments are promoted in CUDA's table
    "aten::_unsafe_masked_index_put_accumulate": {"cuda": KNOWN},
}

OPAQUE_KERNELS = tuple(_RESULTS)
"""Qualified overload names of all such ops, for any device."""


def opaque_result(op: str, device_type: str) -> str | None:
    """Returns the dtype of an opaque kernel's result under autocast.

    Args:
        op: A qualified overload name.
        device_type: The device type.

    Returns:
        ``LOW``, ``FLOAT32`` or ``KNOWN``; None if autocast does not affect the kernel.
    """
    results = _RESULTS.get(op, {})
    return results.get(device_type, results.get(_ANY))

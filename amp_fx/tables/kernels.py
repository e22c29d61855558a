"""Ops without a policy whose kernels call ops that have one.

Eager autocast is on inside of a kernel, and casts for the ops that it calls, where no pass can
insert a cast. Such an op runs under native autocast, unless ``graphs/opened_kernels.py`` has its
function. The table was measured by calling every op of ``op_db`` with autocast on and off: on the
CPU, and for CUDA with kernels of the CPU (``tests/cuda``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LOW, FLOAT32, KNOWN = "low", "float32", "known"
"""Dtype of a result: the low one, float32, or what the op's fake kernel says."""

_ANY = "any other"

_RESULTS: Mapping[str, Mapping[str, str]] = {
    # torch.nn.functional.bilinear: bmm inside, summed in the inputs' dtype
    "aten::_trilinear": {_ANY: KNOWN},
    # the CPU kernels emulate the scaled product: matmul, then the dtype asked for
    "aten::_scaled_mm": {_ANY: KNOWN},
    "aten::_scaled_mm_v2": {_ANY: KNOWN},
    # matmul inside, whose result is in its result
    "aten::_euclidean_dist": {_ANY: LOW},
    # torch.nn.functional.affine_grid: a bmm is its result
    "aten::affine_grid_generator": {_ANY: LOW},
    # torch.linalg.pinv: the product of U, 1/S and V is its result
    "aten::linalg_pinv.atol_rtol_tensor": {_ANY: LOW},
    # torch.linalg.polar, since torch 2.15: products of an SVD's factors, in the input's dtype
    "aten::linalg_polar": {_ANY: KNOWN},
    # pow, sum and softmax inside, which CUDA's table has in float32
    "aten::ldexp.Tensor": {"cuda": FLOAT32},
    "aten::mvlgamma": {"cuda": FLOAT32},
    "aten::_safe_softmax": {"cuda": FLOAT32},
    # index_put inside, whose arguments CUDA's table gives one dtype
    "aten::_unsafe_masked_index_put_accumulate": {"cuda": KNOWN},
}

OPAQUE_KERNELS = tuple(_RESULTS)
"""Qualified overload names of all, whatever the device."""


def opaque_result(op: str, device_type: str) -> str | None:
    """The dtype of what an opaque kernel gives under autocast on a device.

    Args:
        op: A qualified overload name.
        device_type: The type of the device.

    Returns:
        ``LOW``, ``FLOAT32`` or ``KNOWN``; None where autocast acts on nothing inside.
    """
    found = _RESULTS.get(op, {})
    return found.get(device_type, found.get(_ANY))

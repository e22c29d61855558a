"""Ops without a policy whose kernels call ops that have one.

Eager autocast is still on inside a kernel, so that what it calls is cast there, where no
pass can put a cast: such an op has to run under native autocast. Measured on the CPU by
calling every op of ``op_db``, and the attention fast path, with autocast on and off.
"""

from __future__ import annotations

import types

OPAQUE_KERNELS = types.MappingProxyType(
    {
        # torch.nn.functional.bilinear: bmm inside, summed in the inputs' dtype
        "aten::_trilinear": False,
        # the CPU kernels emulate the scaled product: matmul, then the dtype asked for
        "aten::_scaled_mm": False,
        "aten::_scaled_mm_v2": False,
        # torch.linalg.pinv: the product of U, 1/S and V is its result
        "aten::linalg_pinv.atol_rtol_tensor": True,
        # torch.linalg.polar, since torch 2.15: products of an SVD's factors, in the input's dtype
        "aten::linalg_polar": False,
        # fast path of nn.TransformerEncoderLayer: linear and attention
        "aten::_transformer_encoder_layer_fwd": True,
    }
)
"""Qualified overload name -> whether the result is in the low dtype, which the op's fake
kernel does not know."""

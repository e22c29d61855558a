"""MPS: a list of its own, which casts inputs where others set a dtype argument.

Source: ``TORCH_LIBRARY_IMPL(aten, AutocastMPS, m)`` in ``ATen/autocast_mode.cpp``. Its
comment says ``fp32_set_opt_dtype`` above the reductions; what it registers is ``fp32``.
"""

from __future__ import annotations

from amp_fx.tables import families
from amp_fx.tables.build import build_table, ops
from amp_fx.tables.cast_policy import CastPolicy

# As on other devices but for conv_transpose3d, which MPS refuses in low dtypes.
CONVOLUTIONS = ops("""
    _convolution _convolution.deprecated _mps_convolution convolution conv1d conv2d conv3d
    conv_tbc conv_transpose1d conv_transpose2d.input
""")
FLOAT32_CONVOLUTIONS = ops("conv_transpose3d.input")

# One of the cells and one of the attention ops: MPS lists no others.
RNN_CELLS = ops("lstm_cell")
ATTENTION = ops("scaled_dot_product_attention")

# Means and variances, as in the other normalizations; listed by MPS alone.
BATCH_NORMALIZATION = ops("batch_norm")

MPS = build_table(
    (
        (CastPolicy.LOWER_PRECISION_FP, CONVOLUTIONS),
        (CastPolicy.LOWER_PRECISION_FP, families.MATRIX_PRODUCTS),
        (CastPolicy.LOWER_PRECISION_FP, families.LEARNED_ACTIVATIONS),
        (CastPolicy.LOWER_PRECISION_FP, RNN_CELLS),
        (CastPolicy.LOWER_PRECISION_FP, ATTENTION),
        (CastPolicy.FP32, FLOAT32_CONVOLUTIONS),
        (CastPolicy.FP32, families.POINTWISE),
        (CastPolicy.FP32, families.NORMALIZATIONS),
        (CastPolicy.FP32, BATCH_NORMALIZATION),
        (CastPolicy.FP32, families.NORMS),
        (CastPolicy.FP32, families.DISTANCES),
        (CastPolicy.FP32, families.LOSSES),
        (CastPolicy.FP32, families.PRODUCTS),
        (CastPolicy.FP32, families.REDUCTIONS),
        (CastPolicy.FP32, families.NAMED_PRODUCTS),
        (CastPolicy.FP32, families.NAMED_REDUCTIONS),
        (CastPolicy.PROMOTE, families.SEVERAL_INPUTS),
    )
)

"""CUDA: the reference lists, cuDNN's convolutions and the ban.

Source: ``TORCH_LIBRARY_IMPL(aten, Autocast, m)`` in ``ATen/autocast_mode.cpp``.
"""

from __future__ import annotations

from amp_fx.tables import families
from amp_fx.tables.build import build_table, ops
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.reference import ROWS

# Reached by calls of the op itself only: conv2d and its like come through ``convolution``.
CUDNN_CONVOLUTIONS = ops("cudnn_convolution cudnn_convolution_transpose")

# Square roots of matrices, as on CPU.
MATRIX_FUNCTIONS = ops("linalg_matrix_sqrth")

CUDA = build_table(
    (
        *ROWS,
        (CastPolicy.LOWER_PRECISION_FP, CUDNN_CONVOLUTIONS),
        (CastPolicy.FP32, MATRIX_FUNCTIONS),
        (CastPolicy.BANNED, families.UNSAFE),
    )
)

# Registered by CUDA builds alone, with a kernel that no cast policy describes: it casts to
# float16 whatever the autocast dtype, and lays the weights out anew in one flat buffer
# (``ATen/cudnn/AutocastRNN.cpp``).
CUDA_OWN_KERNELS = ops("_cudnn_rnn")

"""CPU: a short low-precision list, and float32 where no bfloat16 kernel is.

Source: ``TORCH_LIBRARY_IMPL(aten, AutocastCPU, m)`` in ``ATen/autocast_mode.cpp``. Unlike on
CUDA, softmax, the normalizations, ``exp`` and ``sum`` have no policy: CPU kernels compute
them in float32 inside and may return the low dtype.
"""

from __future__ import annotations

from amp_fx.tables import families
from amp_fx.tables.build import build_table, ops
from amp_fx.tables.cast_policy import CastPolicy

# Matrix products of oneDNN.
CONVOLUTIONS = ops("""
    _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
    conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
""")
MATRIX_PRODUCTS = ops("""
    _addmm_activation addbmm addmm baddbmm bmm linalg_vecdot linear matmul mm
""")
ATTENTION = ops("_native_multi_head_attention scaled_dot_product_attention")
RNN_LAYERS = ops("mkldnn_rnn_layer")

# LAPACK has float32, float64 and their complex numbers alone.
LINEAR_ALGEBRA = ops("""
    _lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky
    linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
    linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd
    linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr pinverse qr svd trace
    triangular_solve
""")

# No complex numbers with bfloat16 halves, and no transforms of them.
COMPLEX_RESULTS = ops("""
    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
    fft_irfftn fft_rfft fft_rfft2 fft_rfftn polar stft stft.center view_as_complex
""")

# Pooling, padding and sampling whose CPU kernels lack the low dtypes, or lacked them once.
POOLING = ops("""
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d
    max_pool3d max_unpool2d max_unpool3d
""")
PADDING = ops("""
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
""")
SAMPLING = ops("_grid_sampler_2d_cpu_fallback grid_sampler grid_sampler_2d grid_sampler_3d")

# Order statistics and products, and the simulation of quantization, which must see float32.
STATISTICS = ops("""
    cdist fake_quantize_per_tensor_affine nanquantile nanquantile.scalar quantile quantile.scalar
""")

# CPU adds the composite losses, which other devices look into, and bans none.
MORE_LOSSES = ops("""
    binary_cross_entropy cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
    multilabel_margin_loss_forward
""")

# Several inputs that are copied into one output.
COPIES = ops("cat index_copy index_copy.dimname stack")

CPU = build_table(
    (
        (CastPolicy.LOWER_PRECISION_FP, CONVOLUTIONS),
        (CastPolicy.LOWER_PRECISION_FP, MATRIX_PRODUCTS),
        (CastPolicy.LOWER_PRECISION_FP, ATTENTION),
        (CastPolicy.LOWER_PRECISION_FP, RNN_LAYERS),
        (CastPolicy.LOWER_PRECISION_FP, families.LEARNED_ACTIVATIONS),
        (CastPolicy.FP32, LINEAR_ALGEBRA),
        (CastPolicy.FP32, COMPLEX_RESULTS),
        (CastPolicy.FP32, POOLING),
        (CastPolicy.FP32, PADDING),
        (CastPolicy.FP32, SAMPLING),
        (CastPolicy.FP32, STATISTICS),
        (CastPolicy.FP32, families.LOSSES),
        (CastPolicy.FP32, MORE_LOSSES),
        (CastPolicy.FP32, families.PRODUCTS),
        (CastPolicy.FP32, families.NAMED_PRODUCTS),
        (CastPolicy.PROMOTE, COPIES),
    )
)

"""The CPU lists of Intel Extension for PyTorch, as names of ops without their overloads.

Source: its "Auto Mixed Precision (AMP)" page, "Autocast Op Reference" for CPU. A name stands
for every functional overload that the installed torch has. Names that torch has since
removed stay in the list: a policy shows them as gone.
"""

from __future__ import annotations

from amp_fx.tables.build import Row, ops
from amp_fx.tables.cast_policy import CastPolicy

# Matrix products of oneDNN.
LOW_PRECISION = ops("""
    _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d group_norm linear matmul mm
""")

# LAPACK has float32, float64 and their complex numbers alone.
LINEAR_ALGEBRA = ops("""
    _lu_with_info cholesky cholesky_inverse cholesky_solve eig geqrf inverse linalg_cholesky
    linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr
    linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lstsq lu_solve
    matrix_rank orgqr ormqr pinverse qr svd symeig trace triangular_solve
""")

# No complex numbers with bfloat16 halves, and no transforms of them; "fft_*" is every name
# that starts so.
COMPLEX_RESULTS = ops("fft_* polar stft view_as_complex")

# Kernels that lacked the low dtypes.
POOLING_AND_PADDING = ops("""
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d
    grid_sampler max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d
""")

# Means over many small numbers, and order statistics.
LOSSES = ops("""
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
    cross_entropy_loss ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss
    nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
""")
STATISTICS = ops("cdist fake_quantize_per_tensor_affine nanquantile prod quantile")

# Several inputs that are copied into one output.
COPIES = ops("cat index_copy stack")

IPEX_ROWS: tuple[Row, ...] = (
    (CastPolicy.LOWER_PRECISION_FP, LOW_PRECISION),
    (CastPolicy.FP32, LINEAR_ALGEBRA),
    (CastPolicy.FP32, COMPLEX_RESULTS),
    (CastPolicy.FP32, POOLING_AND_PADDING),
    (CastPolicy.FP32, LOSSES),
    (CastPolicy.FP32, STATISTICS),
    (CastPolicy.PROMOTE, COPIES),
)

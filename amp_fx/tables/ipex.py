"""The CPU lists of Intel Extension for PyTorch, as names of ops without their overloads.

Source: "Autocast Op Reference" for CPU on its "Auto Mixed Precision (AMP)" page. A name represents
all functional overloads of the installed torch; ``fft_*`` represents all names with this prefix.
The list includes names that torch has removed, which policies report as missing.
"""

from __future__ import annotations

from amp_fx.tables.cast_policy import CastPolicy

IPEX_CPU = {
    CastPolicy.LOWER_PRECISION_FP: """
        _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d conv_transpose3d group_norm linear matmul mm
    """,
    CastPolicy.FP32: """
        _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy
        binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
        cosine_embedding_loss cross_entropy_loss ctc_loss eig fake_quantize_per_tensor_affine fft_*
        fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler hinge_embedding_loss
        huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig
        linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve lstsq lu_solve margin_ranking_loss
        matrix_rank max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
        multilabel_margin_loss_forward nanquantile nll_loss nll_loss2d orgqr ormqr pinverse
        poisson_nll_loss polar prod qr quantile reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft svd symeig trace
        triangular_solve triplet_margin_loss view_as_complex
    """,
    CastPolicy.PROMOTE: "cat index_copy stack",
}

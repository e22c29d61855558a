"""Families of ops that several devices share, each with the reason why it is one.

Source: the op lists of ``ATen/autocast_mode.h`` and ``ATen/autocast_mode.cpp``. Overloads that
only some torch versions have are listed like any other; ``versions.py`` says which.
"""

from __future__ import annotations

from amp_fx.tables.build import ops

# Matrix products in the hardware's low-precision units: fast, and accumulated in float32.
CONVOLUTIONS = ops("""
    _convolution _convolution.deprecated convolution conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input
""")

# The same reason; the composites among them (einsum, multi_dot) are judged as a whole.
MATRIX_PRODUCTS = ops("""
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv
""")

# Split from the above: MPS does not list it.
VECTOR_PRODUCTS = ops("linalg_vecdot")

# Weights meet activations of the low dtype; the weight follows (prelu is no matrix product).
LEARNED_ACTIVATIONS = ops("prelu")

# Two matrix products and a few activations, which saturate long before they overflow.
FUSED_RNN_CELLS = ops("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
RNN_CELLS = ops("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

# Matrix products with a softmax between them that the kernels keep in float32.
ATTENTION = ops("_scaled_dot_product_flash_attention scaled_dot_product_attention")

# Outputs that leave float16's range, or lose its few bits, for quite ordinary inputs.
POINTWISE = ops("""
    acos asin cosh erfinv exp expm1 log log10 log1p log2 pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor reciprocal rsqrt sinh softplus tan
""")

# Means and variances: sums over many elements.
NORMALIZATIONS = ops("group_norm layer_norm native_layer_norm")
ROOT_MEAN_SQUARE = ops("rms_norm")

# Sums of squares, which overflow float16 at 256 squared.
NORMS = ops("frobenius_norm.dim nuclear_norm nuclear_norm.dim")
DISTANCES = ops("cdist cosine_similarity dist logsumexp pdist renorm")

# A mean over many small numbers, and the scalar that every gradient starts from.
LOSSES = ops("""
    binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div
    l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
    nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
""")

# Weighted sums of neighbours, forward and backward.
UPSAMPLING = ops("""
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
""")

# Sums and products over many elements whose dtype argument asks for a float32 result without
# a float32 copy of the input.
PRODUCTS = ops("prod prod.dim_int")
REDUCTIONS = ops("""
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm
    log_softmax.int softmax.int sum sum.dim_IntList
""")

# The same ones over named dimensions.
NAMED_PRODUCTS = ops("prod.dim_Dimname")
NAMED_REDUCTIONS = ops("""
    cumprod.dimname cumsum.dimname log_softmax.Dimname softmax.Dimname sum.dim_DimnameList
""")

# No optional dtype argument to set, but an overload that takes one.
NORMS_WITHOUT_DTYPE = ops("norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim")

# Several inputs that must agree, and no reason to prefer either dtype.
SEVERAL_INPUTS = ops("""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot
""")

# Split from the above: MPS does not list it.
COMPLEX_DOT = ops("vdot")

# log of a probability: -inf gradients in float16. PyTorch raises and names the safe loss.
UNSAFE = ops("binary_cross_entropy")

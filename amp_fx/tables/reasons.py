"""Reasons of cast policies, by family of ops.

ATen's lists (``ATen/autocast_mode.h`` and ``.cpp``) contain no reasons, so these are amp_fx's.
Every measured op has a family: the first one with its policy and a matching pattern.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.op_names import ops


class Family(NamedTuple):
    """Ops with the same policy for the same reason.

    Attributes:
        policy: The cast policy of the ops.
        patterns: Globs of overload names without ``aten::``, separated by spaces.
        reason: One or two sentences.
    """

    policy: CastPolicy
    patterns: str
    reason: str


FAMILIES = (
    Family(
        CastPolicy.LOWER_PRECISION_FP,
        "*conv*",
        "Convolutions run in low-precision matrix units, which accumulate in float32.",
    ),
    Family(
        CastPolicy.LOWER_PRECISION_FP,
        "*mm *mv _addmm_activation addr chain_matmul einsum linalg_multi_dot linalg_vecdot linear "
        "matmul",
        "Matrix products run in low-precision matrix units, which accumulate in float32. "
        "Composite products, such as einsum, are cast as a whole.",
    ),
    Family(
        CastPolicy.LOWER_PRECISION_FP,
        "*attention*",
        "Attention is two matrix products. The kernels compute the softmax between them in "
        "float32.",
    ),
    Family(
        CastPolicy.LOWER_PRECISION_FP,
        "*_cell mkldnn_rnn_layer",
        "Recurrent layers are matrix products and activations that saturate before they overflow.",
    ),
    Family(
        CastPolicy.LOWER_PRECISION_FP,
        "prelu",
        "The weight takes the dtype of the activations, which come from low-precision products.",
    ),
    Family(
        CastPolicy.FP32,
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 pow.* reciprocal rsqrt sinh softplus "
        "tan",
        "Outputs leave the range of float16, or lose its few bits, for ordinary inputs.",
    ),
    Family(
        CastPolicy.FP32,
        "batch_norm group_norm layer_norm native_layer_norm rms_norm",
        "Normalizations compute means and variances: sums over many elements.",
    ),
    Family(
        CastPolicy.FP32,
        "frobenius_norm.* linalg_matrix_norm* linalg_vector_norm nuclear_norm*",
        "Sums of squares: in float16, 256 squared overflows.",
    ),
    Family(
        CastPolicy.FP32,
        "cdist cosine_similarity dist logsumexp pdist renorm",
        "Distances sum squares or exponentials, which overflow float16.",
    ),
    Family(
        CastPolicy.FP32,
        "*_loss* binary_cross_entropy* kl_div",
        "A loss is a mean over many small numbers, and all gradients start from it.",
    ),
    Family(
        CastPolicy.FP32,
        "cumprod cumsum prod* *softmax.* sum* trace",
        "Sums and products over many elements.",
    ),
    Family(
        CastPolicy.FP32,
        "*upsample_*",
        "Upsampling computes weighted sums of neighbors, in the forward and in the backward.",
    ),
    Family(CastPolicy.FP32, "conv_transpose3d.input", "MPS has no kernel for low precision."),
    Family(
        CastPolicy.FP32,
        "_lu_with_info cholesky* geqrf inverse linalg_* lu_solve orgqr ormqr pinverse qr svd "
        "triangular_solve",
        "LAPACK has no low-precision routines, and neither have the libraries of accelerators.",
    ),
    Family(
        CastPolicy.FP32,
        "fft_* polar stft* view_as_complex",
        "There are no complex numbers of two bfloat16 halves.",
    ),
    Family(
        CastPolicy.FP32,
        "*_pool?d max_unpool?d *_pad?d *grid_sampler*",
        "The CPU kernels have no low-precision version, or had none when the list was made.",
    ),
    Family(
        CastPolicy.FP32,
        "*quantile* fake_quantize_*",
        "Quantiles, and the simulation of quantization, depend on the exact order of values.",
    ),
    Family(
        CastPolicy.FP32_SET_OPT_DTYPE,
        "cumprod cumsum linalg_matrix_norm* linalg_vector_norm prod* *softmax.* sum*",
        "Sums and products over many elements. Their dtype argument gives a float32 result "
        "without a float32 copy of the input.",
    ),
    Family(
        CastPolicy.FP32_APPEND_DTYPE,
        "norm.*",
        "Sums of squares. There is no optional dtype argument to set, but an overload that takes "
        "one.",
    ),
    Family(
        CastPolicy.PROMOTE,
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot "
        "vdot",
        "The inputs must have one dtype, and nothing speaks against low precision.",
    ),
    Family(CastPolicy.PROMOTE, "cat index_copy stack", "Several inputs are copied to one output."),
    Family(
        CastPolicy.BANNED,
        "binary_cross_entropy",
        "The logarithm of a probability has infinite gradients in float16. PyTorch raises an error "
        "that names the safe loss.",
    ),
)


def family_of(op: str, policy: CastPolicy) -> Family | None:
    """Returns the family of an op with a policy, by its qualified overload name, or None."""
    for family in FAMILIES:
        is_match = any(fnmatch.fnmatchcase(op, pattern) for pattern in ops(family.patterns))
        if is_match and family.policy is policy:
            return family
    return None

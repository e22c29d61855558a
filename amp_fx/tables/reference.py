"""The op lists that every accelerator starts from; XPU, MTIA and MAIA only add the ban.

Source: ``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_FP32``, ``AT_FORALL_FP32_SET_OPT_DTYPE``,
``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE`` and ``AT_FORALL_PROMOTE`` of
``ATen/autocast_mode.h``, which exist so that a backend outside of PyTorch ("PrivateUse1")
can register the same policies as CUDA has. Nothing is registered for it by default.

Source of the three: ``TORCH_LIBRARY_IMPL(aten, AutocastXPU, m)`` and its two siblings in
``ATen/autocast_mode.cpp``.
"""

from __future__ import annotations

from amp_fx.tables import families
from amp_fx.tables.build import Row, build_table
from amp_fx.tables.cast_policy import CastPolicy

ROWS: tuple[Row, ...] = (
    (CastPolicy.LOWER_PRECISION_FP, families.CONVOLUTIONS),
    (CastPolicy.LOWER_PRECISION_FP, families.MATRIX_PRODUCTS),
    (CastPolicy.LOWER_PRECISION_FP, families.VECTOR_PRODUCTS),
    (CastPolicy.LOWER_PRECISION_FP, families.LEARNED_ACTIVATIONS),
    (CastPolicy.LOWER_PRECISION_FP, families.FUSED_RNN_CELLS),
    (CastPolicy.LOWER_PRECISION_FP, families.RNN_CELLS),
    (CastPolicy.LOWER_PRECISION_FP, families.ATTENTION),
    (CastPolicy.FP32, families.POINTWISE),
    (CastPolicy.FP32, families.NORMALIZATIONS),
    (CastPolicy.FP32, families.ROOT_MEAN_SQUARE),
    (CastPolicy.FP32, families.NORMS),
    (CastPolicy.FP32, families.DISTANCES),
    (CastPolicy.FP32, families.LOSSES),
    (CastPolicy.FP32, families.UPSAMPLING),
    (CastPolicy.FP32_SET_OPT_DTYPE, families.PRODUCTS),
    (CastPolicy.FP32_SET_OPT_DTYPE, families.REDUCTIONS),
    (CastPolicy.FP32_SET_OPT_DTYPE, families.NAMED_PRODUCTS),
    (CastPolicy.FP32_SET_OPT_DTYPE, families.NAMED_REDUCTIONS),
    (CastPolicy.FP32_APPEND_DTYPE, families.NORMS_WITHOUT_DTYPE),
    (CastPolicy.PROMOTE, families.SEVERAL_INPUTS),
    (CastPolicy.PROMOTE, families.COMPLEX_DOT),
)

REFERENCE = build_table(ROWS)


XPU = build_table((*ROWS, (CastPolicy.BANNED, families.UNSAFE)))
MTIA = XPU
MAIA = XPU

"""Kernels of torch with private names."""

from __future__ import annotations

import torch

addmm_activation = torch._addmm_activation
amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
masked_softmax = torch._masked_softmax
native_multi_head_attention = torch._native_multi_head_attention
scaled_mm = torch._scaled_mm

"""Rounds float32 tensors to a low dtype in an op that inductor does not optimize away.

If a kernel of inductor casts a value to a low dtype and reads it in float32, it skips both casts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from amp_fx.dtypes import is_dtensor

_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rounded(Tensor x, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "rounded", "CompositeExplicitAutograd")
def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds a tensor to a low dtype without changing its dtype."""
    return x.to(dtype).to(x.dtype)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Calls ``amp_fx::rounded``; on the local shard of a DTensor."""
    if is_dtensor(x):
        from torch.distributed.tensor import DTensor

        dtensor: Any = x
        return DTensor.from_local(
            round_to(dtensor.to_local(), dtype),
            dtensor.device_mesh,
            dtensor.placements,
            run_check=False,
            shape=dtensor.shape,
            stride=dtensor.stride(),
        )
    result: torch.Tensor = torch.ops.amp_fx.rounded(x, dtype)
    return result


@functools.cache
def lower_rounded() -> None:
    """Registers a lowering of ``amp_fx::rounded``, so that inductor rounds inside its kernels.

    Relies on ``ops.to_dtype`` of ``torch._inductor``, which returns the low value itself with
    ``use_compute_types=False``, and on ``register_lowering``.
    """
    from amp_fx.torch_private.inductor import make_pointwise, ops, register_lowering

    @register_lowering(torch.ops.amp_fx.rounded.default, type_promotion_kind=None)
    def lower(x: Any, dtype: torch.dtype) -> Any:
        def round_one(value: Any) -> Any:
            # Multiply by one, because the C++ backend optimizes away roundings of the value itself.
            value = ops.mul(value, ops.constant(1.0, torch.float32))
            low = ops.to_dtype(value, dtype, src_dtype=torch.float32, use_compute_types=False)
            return ops.to_dtype(low, torch.float32, src_dtype=dtype)

        return make_pointwise(round_one)(x)

"""FSDP2 policies that gather weights in the low dtype if autocast would cast them anyway."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.errors import PolicyWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy


class HasLowWeights(Protocol):
    """The result of ``amp_fx.explain``."""

    def low_weights(self) -> dict[str, torch.dtype]:
        """Dtypes by the paths of weights (``Explanation.low_weights``)."""


def fsdp_policy(
    model: torch.nn.Module, explanation: HasLowWeights | Mapping[str, torch.dtype], **kwargs: Any
) -> MixedPrecisionPolicy:
    """Returns a policy with which FSDP2 gathers weights in the dtype that autocast reads.

    ``MixedPrecisionPolicy(torch.bfloat16)`` lowers all weights, including those of norms, which
    autocast reads in float32 on CUDA. With this policy, a weight is gathered in the low dtype only
    if all readers share one cast to that dtype. The results do not change, because the weight is
    rounded before the all-gather instead of after it, and half the bytes are communicated.
    Gradients are reduced in float32::

        explanation = amp_fx.explain(model)(x)
        policy = amp_fx.fsdp_policy(model, explanation)
        for block in model.blocks:
            block.compile(backend="amp_fx")
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    Args:
        model: The model, before ``fully_shard``. It may be on the ``meta`` device, and
            ``parallelize_module`` may have changed it after it was explained.
        explanation: Explanation of the model before it was sharded, or dtypes of weights by path.
        kwargs: Arguments of ``MixedPrecisionPolicy``. ``reduce_dtype`` defaults to float32, and
            ``cast_forward_inputs`` to False, because it would round the inputs of blocks.

    Raises:
        UnsupportedError: FSDP2 does not support a dtype per parameter (requires torch 2.15), the
            explanation belongs to another model, or the model is already sharded.
        TypeError: ``param_dtype`` or ``param_dtype_override_fn`` was passed.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    _check_version(MixedPrecisionPolicy)
    for name in ("param_dtype", "param_dtype_override_fn"):
        if name in kwargs:
            raise TypeError(f"fsdp_policy sets {name} itself: omit the argument")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded: call fsdp_policy before fully_shard"
        )
    dtypes = explanation.low_weights() if hasattr(explanation, "low_weights") else explanation
    low_dtype, low_weights = _choose(model, dict(dtypes))
    if low_dtype is None:
        warnings.warn(
            f"no weight of {type(model).__name__} is only read through one cast to low precision, "
            "so FSDP2 gathers all weights in their dtypes. amp_fx.explain lists the readers of "
            "weights; it cannot see readers outside of graphs",
            PolicyWarning,
            stacklevel=2,
        )
    # The policy outlives sharding, so it must refer to the full weights weakly.
    low = WeakTensorKeyDictionary(dict.fromkeys(low_weights, True))
    settings: dict[str, Any] = {
        "reduce_dtype": torch.float32,
        "cast_forward_inputs": False,
        **kwargs,
        "param_dtype_override_fn": lambda weight: None if weight in low else weight.dtype,
    }
    return MixedPrecisionPolicy(param_dtype=low_dtype, **settings)


def _check_version(policy: Any) -> None:
    """Relies on the field ``param_dtype_override_fn``, which came with torch 2.15."""
    if "param_dtype_override_fn" not in {field.name for field in dataclasses.fields(policy)}:
        raise UnsupportedError(
            "fsdp_policy needs torch 2.15, whose FSDP2 supports a dtype per parameter; this is "
            f"torch {torch.__version__}. Call fully_shard without a policy, which gathers in "
            "float32, for the same results"
        )


def _choose(
    model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]
) -> tuple[torch.dtype | None, Sequence[torch.Tensor]]:
    """Returns the dtype of most low weights, and the parameters with that dtype."""
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    unknown = [path for path in dtypes if path not in named and path not in buffers]
    if unknown:
        raise UnsupportedError(
            f"{type(model).__name__} has no weight {unknown[0]!r}: pass an explanation of this "
            "model, not of another model or of a module around it"
        )
    counts = Counter(dtype for path, dtype in dtypes.items() if path in named)
    if not counts:
        return None, []
    low_dtype = counts.most_common(1)[0][0]
    return low_dtype, [named[p] for p, dtype in dtypes.items() if p in named and dtype == low_dtype]

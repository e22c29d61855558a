"""FSDP2 that gathers in the low dtype what autocast would cast anyway, and nothing else."""

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
    """The policy with which FSDP2 gathers weights as low as autocast reads them.

    ``MixedPrecisionPolicy(torch.bfloat16)`` makes all weights low, those of norms too, which
    autocast reads in float32 on CUDA. With this policy a weight is gathered low only if every
    reader takes it through one low cast: rounding before gathering gives the same numbers as
    rounding behind it, and half the bytes go over the wire. Gradients are reduced in float32::

        explanation = amp_fx.explain(model)(x)
        policy = amp_fx.fsdp_policy(model, explanation)
        for block in model.blocks:
            block.compile(backend="amp_fx")
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    Args:
        model: What is to be sharded: not sharded yet by FSDP. It may be on the ``meta`` device, and
            ``parallelize_module`` may have changed it since it was explained.
        explanation: Of this model, before it was sharded, or weights' dtypes by path.
        kwargs: Further arguments of ``MixedPrecisionPolicy``. ``reduce_dtype`` is float32 and
            ``cast_forward_inputs`` False, unless given: inputs of blocks would be rounded.

    Raises:
        UnsupportedError: This torch's FSDP2 cannot tell parameters apart (2.15 can), the
            explanation is of another model, or the model is sharded already.
        TypeError: ``param_dtype`` or ``param_dtype_override_fn`` is among the arguments.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    _check_version(MixedPrecisionPolicy)
    for name in ("param_dtype", "param_dtype_override_fn"):
        if name in kwargs:
            raise TypeError(f"fsdp_policy sets {name} by itself: omit it")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded: ask for the policy before fully_shard"
        )
    dtypes = explanation.low_weights() if hasattr(explanation, "low_weights") else explanation
    low_dtype, chosen = _choose(model, dict(dtypes))
    if low_dtype is None:
        warnings.warn(
            f"no weight of {type(model).__name__} is read only through one cast to low precision: "
            "FSDP2 gathers all weights as they are (amp_fx.explain lists their readers; graph "
            "breaks hide readers)",
            PolicyWarning,
            stacklevel=2,
        )
    given: dict[str, Any] = {"reduce_dtype": torch.float32, "cast_forward_inputs": False, **kwargs}
    # The policy outlives sharding, whole weights must not: they are held weakly.
    low = WeakTensorKeyDictionary(dict.fromkeys(chosen, True))
    given["param_dtype_override_fn"] = lambda weight: None if weight in low else weight.dtype
    return MixedPrecisionPolicy(param_dtype=low_dtype, **given)


def _check_version(policy: Any) -> None:
    """Relies on the field ``param_dtype_override_fn``, which came with torch 2.15."""
    if "param_dtype_override_fn" not in {field.name for field in dataclasses.fields(policy)}:
        raise UnsupportedError(
            "fsdp_policy needs torch 2.15, whose FSDP2 takes a dtype for each parameter; this is "
            f"{torch.__version__}. Autocast's numbers need no policy: without one fully_shard "
            "gathers in float32"
        )


def _choose(
    model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]
) -> tuple[torch.dtype | None, Sequence[torch.Tensor]]:
    """The dtype that most low weights have, and the parameters that have it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    unknown = [path for path in dtypes if path not in named and path not in buffers]
    if unknown:
        raise UnsupportedError(
            f"{type(model).__name__} has no weight {unknown[0]!r}: the explanation belongs to "
            "another model, or to a module around it"
        )
    counts = Counter(dtype for path, dtype in dtypes.items() if path in named)
    if not counts:
        return None, []
    low_dtype = counts.most_common(1)[0][0]
    return low_dtype, [named[p] for p, dtype in dtypes.items() if p in named and dtype == low_dtype]

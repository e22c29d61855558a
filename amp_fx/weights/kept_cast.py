"""A kept cast: the added input that it becomes, and the op that stands for it.

``amp_fx::kept_cast(weight, low)`` returns ``low``, which the cache keeps equal to
``weight.to(low.dtype)``, and differentiates as that cast does. Its kernel sits on the
Autograd key, so that tracing for AOTAutograd goes through it: the compiled graph holds
neither the op nor, in the forward, the weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Slot:
    """One kept cast of one graph; the added placeholder has it as its ``KEPT_INPUT``.

    Attributes:
        source_index: Position of the weight among the graph's inputs.
        dtype: Dtype of the copy.
        name: What the user's program calls the weight.
        is_alias: Whether the input is no copy but the weight's own bytes, in a storage that
            may be asked for pointers without anybody taking that for a write.
    """

    source_index: int
    dtype: torch.dtype
    name: str = "a weight"
    is_alias: bool = False


_library = torch.library.Library("amp_fx", "DEF")  # type: ignore[no-untyped-call]
_library.define("kept_cast(Tensor weight, Tensor low) -> Tensor")  # type: ignore[no-untyped-call]


class _KeptCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        ctx.weight_dtype = weight.dtype
        return low.detach()  # no view of ``low``: autograd tells a later write as of any input

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.weight_dtype), None


def _autograd(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _KeptCast.apply(weight, low)  # type: ignore[no-untyped-call]
    return result


def _no_autograd(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return low.view_as(low)


_library.impl("kept_cast", _autograd, "Autograd")  # type: ignore[no-untyped-call]
_library.impl("kept_cast", _no_autograd, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

kept_cast = torch.ops.amp_fx.kept_cast.default

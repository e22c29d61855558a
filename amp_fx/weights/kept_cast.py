"""A kept cast: the added input that it becomes, and the op that stands for it.

``amp_fx::kept_cast(weight, low)`` returns ``low``, which the cache keeps equal to
``weight.to(low.dtype)``, and differentiates as that cast does. Its kernel sits on the
Autograd key, so that tracing for AOTAutograd goes through it: the compiled graph holds
neither the op nor, in the forward, the weight.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclasses.dataclass(frozen=True)
class Slot:
    """One kept cast of one graph; the added placeholder has it as its ``KEPT_INPUT``.

    Attributes:
        source_index: Position of the weight among the graph's inputs.
        dtype: Dtype of the copy.
        name: What the user's program calls the weight.
        is_alias: Whether the input is no copy but the weight's own bytes, in a storage that
            may be asked for pointers without anybody taking that for a write.
        memory_format: How the copy is laid out; by default as its weight is.
    """

    source_index: int
    dtype: torch.dtype
    name: str = "a weight"
    is_alias: bool = False
    memory_format: torch.memory_format = torch.preserve_format

    ops: ClassVar[tuple[str, ...]] = ()

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the weight alone."""
        return (self.source_index,)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weight alone."""
        return (self.name,)

    def key(self, weights: tuple[torch.Tensor, ...]) -> Hashable:  # noqa: ARG002
        """Equal for casts that give the same."""
        return self.dtype, self.is_alias, self.memory_format

    def make(self, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Casts the weight."""
        return weights[0].to(self.dtype, copy=True, memory_format=self.memory_format)

    def laid_out(self, weight: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and strides of the copy of a weight."""
        if self.is_alias or (
            self.memory_format is torch.preserve_format and weight.is_contiguous()
        ):
            return self.dtype, weight.stride()
        like = torch.empty_like(
            weight, dtype=self.dtype, device="meta", memory_format=self.memory_format
        )
        return self.dtype, like.stride()


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

_library.define("laid_out_as_before(Tensor low) -> Tensor")  # type: ignore[no-untyped-call]


def _contiguous(low: torch.Tensor) -> torch.Tensor:
    return low.clone(memory_format=torch.contiguous_format)


_library.impl("laid_out_as_before", _contiguous, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

laid_out_as_before = torch.ops.amp_fx.laid_out_as_before.default
"""A kept copy in the layout that its weight has (``amp_fx.passes.lay_out_kept_copies``)."""

"""Compiles the computation of cached values on GPUs, where op by op it would be many kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.metadata import VALUE
from amp_fx.weights.split import CachedValueSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


def is_compiled(spec: Any, weights: Sequence[torch.Tensor]) -> bool:
    """Returns True if ``write_values`` computes a value: one on a GPU, by Triton."""
    is_computed = isinstance(spec, CachedValueSpec) and not spec.is_alias and not spec.is_cast
    return is_computed and weights[0].is_cuda and _has_triton()


def empty_values(spec: CachedValueSpec, weights: Sequence[torch.Tensor]) -> Any:
    """Allocates the value that a description is of: a tensor or a tuple of tensors."""
    fakes = [VALUE.of(output) for output in spec.outputs]
    values = tuple(
        torch.empty_strided(f.size(), f.stride(), dtype=f.dtype, device=weights[0].device)
        for f in fakes
    )
    return values[0] if len(values) == 1 else values


def write_values(
    specs: Sequence[CachedValueSpec], weights: Sequence[torch.Tensor], values: Sequence[Any]
) -> None:
    """Computes values of the same weights into their memory, by one function.

    Weights of the same layouts share the function.
    """
    layouts = tuple((w.dtype, w.size(), w.stride()) for w in weights)
    keys = tuple(spec.key(tuple(weights)) for spec in specs)
    targets = [value if isinstance(value, tuple) else (value,) for value in values]
    _writer((keys, layouts), _Unhashed(specs))(weights, targets)


class _Unhashed:
    """Argument that a cache does not look at."""

    def __init__(self, specs: Sequence[CachedValueSpec]) -> None:
        self.specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashed)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _writer(_: Hashable, given: _Unhashed) -> Callable[..., None]:
    return torch.compile(writing(given.specs), dynamic=False)


def writing(specs: Sequence[CachedValueSpec]) -> Callable[..., None]:
    """Returns a function that computes values into given tensors.

    It has its own code object, of which Dynamo compiles few variants.
    """
    functions = [spec.function for spec in specs]

    def write(weights: Sequence[torch.Tensor], targets: Sequence[Sequence[torch.Tensor]]) -> None:
        for function, own in zip(functions, targets, strict=True):
            for target, source in zip(own, function(*weights), strict=True):
                target.copy_(source)

    write.__code__ = write.__code__.replace()
    return write


@functools.cache
def _has_triton() -> bool:
    from amp_fx.torch_private.inductor import has_triton

    return has_triton()

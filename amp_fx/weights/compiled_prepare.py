"""Compiles the computation of cached values on GPUs, to launch fewer kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.metadata import VALUE
from amp_fx.weights.split import CachedValueSpec, is_view

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


def is_compiled(spec: Any, weights: Sequence[torch.Tensor]) -> bool:
    """Returns True if ``write_values`` computes a value, which requires a GPU with Triton.

    Other values are casts, or views of weights, or repeat elements in memory (``expand``).
    """
    is_computed = isinstance(spec, CachedValueSpec) and not spec.is_alias and not spec.is_cast
    return is_computed and weights[0].is_cuda and _has_triton() and _has_memory(spec)


def _has_memory(spec: CachedValueSpec) -> bool:
    if all(is_view(node) for node in spec.nodes if node.op == "call_function"):
        return False
    fakes = [VALUE.get(output) for output in spec.outputs]  # inductor's folding of norms sets none
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
    return all(fake is not None and is_dense(fake) for fake in fakes)


def empty_values(spec: CachedValueSpec, weights: Sequence[torch.Tensor]) -> Any:
    """Allocates the memory of a value: a tensor or a tuple of tensors."""
    fakes = [VALUE.of(output) for output in spec.outputs]
    values = tuple(
        torch.empty_strided(f.size(), f.stride(), dtype=f.dtype, device=weights[0].device)
        for f in fakes
    )
    return values[0] if len(values) == 1 else values


def write_values(
    specs: Sequence[CachedValueSpec], weights: Sequence[torch.Tensor], values: Sequence[Any]
) -> None:
    """Computes values of the same weights into existing memory with one compiled function.

    Weights with equal dtypes, shapes and strides share the function.
    """
    layouts = tuple((w.dtype, w.size(), w.stride()) for w in weights)
    keys = tuple(spec.key(tuple(weights)) for spec in specs)
    targets = [value if isinstance(value, tuple) else (value,) for value in values]
    _writer((keys, layouts), _Unhashed(specs))(weights, targets)


class _Unhashed:
    """Argument that ``functools.cache`` ignores: all instances are equal."""

    def __init__(self, specs: Sequence[CachedValueSpec]) -> None:
        self.specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashed)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _writer(_: Hashable, unhashed: _Unhashed) -> Callable[..., None]:
    return torch.compile(writing(unhashed.specs), dynamic=False)


def writing(specs: Sequence[CachedValueSpec]) -> Callable[..., None]:
    """Returns a function that computes values into existing tensors."""
    functions = [spec.function for spec in specs]

    def write(weights: Sequence[torch.Tensor], targets: Sequence[Sequence[torch.Tensor]]) -> None:
        for function, outputs in zip(functions, targets, strict=True):
            for output, source in zip(outputs, function(*weights), strict=True):
                output.copy_(source)

    # Dynamo limits recompilations per code object, so each function has a copy of the code object.
    write.__code__ = write.__code__.replace()
    return write


@functools.cache
def _has_triton() -> bool:
    from amp_fx.torch_private.inductor import has_triton

    return has_triton()

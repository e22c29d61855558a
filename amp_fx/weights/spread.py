"""Weights that are spread over processes (DTensor), as tensor parallelism leaves them.

What is watched, and what a copy is kept of, is a weight's part in this process, a plain tensor.
The graph takes the copy as a DTensor that lies over the processes as the weight does.

Relies on ``DTensor(local_tensor, spec, requires_grad=...)``, on its ``_local_tensor``, and on its
``_spec``, a dataclass whose ``tensor_meta`` (a named tuple) holds shape, strides and dtype.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from amp_fx.weights.engine import engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


def is_spread(value: Any) -> bool:
    """Whether something is a DTensor; without importing what takes a second to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part in this process, in the same memory; any other tensor as it is."""
    return tensor._local_tensor if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``part_of`` for many."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = module and module.DTensor
    return [t._local_tensor if type(t) is kind else t for t in tensors]  # type: ignore[attr-defined]


def spec_like(weight: torch.Tensor, dtype: torch.dtype) -> Any:
    """How a DTensor of another dtype lies that lies as a weight does."""
    spec = weight._spec  # type: ignore[attr-defined]
    return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def spread_as(spec: Any, part: torch.Tensor) -> torch.Tensor:
    """The DTensor of which this is the part in this process."""
    tensor: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor(
        part, spec, requires_grad=False
    )
    return tensor


def with_parts(positions: tuple[int, ...], call: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that gets, behind its arguments, the parts of some of them."""
    if not positions:
        return call

    def call_with_parts(*args: Any) -> Any:
        parts = [part_of(args[i]) for i in positions]
        if parts[0].device.type != "cpu":  # where ops that write lists ask no storage
            for i, part in zip(positions, parts, strict=True):
                engine().stands_for(args[i], part)
        return call(*args, *parts)

    return call_with_parts


def spreading(specs: Mapping[int, Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that is given parts for some of its inputs.

    Args:
        specs: By position, how the input lies over the processes.
        compiled: Takes DTensors there.
    """
    if not specs:
        return compiled

    def call_with_spread(*inputs: Any) -> Any:
        return compiled(
            *[spread_as(specs[i], x) if i in specs else x for i, x in enumerate(inputs)]
        )

    return call_with_spread

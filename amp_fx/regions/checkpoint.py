"""Makes eager ``torch.utils.checkpoint`` recompute in the regions of the forward.

It restores the autocast state of two devices, its own and the CPU's; a policy travels in
that of two others (``policy_codes``). It restores a state that is off by a disabled region, which
says full precision where there was no region at all (``state.in_disabled_region``).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from amp_fx.regions.policy_codes import CARRIERS, ambient_policy
from amp_fx.regions.state import nested_as, nesting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@functools.cache
def restore_regions() -> None:
    """Changes what checkpoints record from here on, for the whole process.

    Relies on ``checkpoint.CheckpointFunction.forward`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` (``..._impl`` since torch 2.14 or
    2.15) getting the function as argument 1 and 0, and on ``checkpoint.checkpoint`` looking
    both up when it is called.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):
        name = f"{name}_impl"
    reentrant = checkpoint.CheckpointFunction.forward
    other = getattr(checkpoint, name)

    @functools.wraps(reentrant)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _with_regions_of_now(function), *args)  # type: ignore[no-untyped-call]

    @functools.wraps(other)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return other(_with_regions_of_now(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, generator)


def _with_regions_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    carried, policy, depth = _carried(), ambient_policy(), nesting()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _carrying(carried), nested_as(depth):
            return function(*args, **kwargs)

    call._amp_fx_policy = policy  # type: ignore[attr-defined]  # keeps its number
    return call


_Carried = tuple[tuple[torch.dtype, bool], ...]


def _carried() -> _Carried:
    return tuple((torch.get_autocast_dtype(c), torch.is_autocast_enabled(c)) for c in CARRIERS)


@contextlib.contextmanager
def _carrying(carried: _Carried) -> Iterator[None]:
    before = _carried()
    _set_carried(carried)
    try:
        yield
    finally:
        _set_carried(before)


def _set_carried(carried: _Carried) -> None:
    for carrier, (dtype, is_enabled) in zip(CARRIERS, carried, strict=True):
        torch.set_autocast_dtype(carrier, dtype)
        torch.set_autocast_enabled(carrier, is_enabled)

"""Captures a model by ``torch.export``, as it runs in a region or outside of any."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amp_fx.regions.state import AutocastState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from torch.export import ExportedProgram


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    state: AutocastState | None,
    *,
    dynamic_shapes: Any,
    strict: bool,
) -> ExportedProgram:
    """Exports a model with ``torch.export``, outside of the calling thread's region.

    Python code of the model that reads dtypes or ``torch.is_autocast_enabled()`` sees the region
    ``state``, which the program then has around all of it.
    """
    without = AutocastState.ambient().turned_off()
    with without.applied(), torch.no_grad(), _without_fast_path(), _called_in(model, state):
        return torch.export.export(
            model,
            args,
            None if kwargs is None else dict(kwargs),
            dynamic_shapes=dynamic_shapes,
            strict=strict,
        )


def devices_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> set[torch.device]:
    """The devices of a model's parameters and buffers, and of its arguments."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *pytree.tree_leaves((args, dict(kwargs or {}))),
    ]
    return {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keeps ``nn.TransformerEncoder`` from one op whose kernel alone knows of autocast.

    ``torch.export`` does so by itself where it is not strict.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _called_in(model: nn.Module, state: AutocastState | None) -> Iterator[None]:
    """Runs every call of a model in a region, hooks included, while the context is open.

    The model gets a class of its own for that time: ``torch.export`` takes paths of modules from
    the module that it is given, which a module around it would change.
    """
    if state is None:
        yield
        return
    kind = type(model)

    def call_itself(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs)  # which torch.export replaces meanwhile

    call: Callable[..., Any] = call_itself
    for device_type in reversed(state.enabled):
        call = _inside(call, device_type, state.low_dtype(device_type), state.cache_enabled)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})
    try:
        yield
    finally:
        model.__class__ = kind


def _inside(
    call: Callable[..., Any], device_type: str, dtype: torch.dtype, cache_enabled: bool
) -> Callable[..., Any]:
    def call_inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype, cache_enabled=cache_enabled):
            return call(self, *args, **kwargs)

    return call_inside

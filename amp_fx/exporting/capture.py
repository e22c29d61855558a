"""Captures a model by ``torch.export``, as it runs in a region or outside of any."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from amp_fx.errors import ExportError
from amp_fx.passes.refuse_islands import place_of
from amp_fx.regions.state import AutocastState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from torch.export import ExportedProgram

_MODULE = "torch._functorch"
"""The modules of the functions that ``torch.export`` records of a transform."""


def refuse_transforms(program: ExportedProgram) -> None:
    """Refuses what ``torch.vmap``, ``torch.func.grad`` and the like left in a program."""
    for module in program.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if _is_transform(node):
                raise ExportError(
                    f"{node.format_node()} is part of a torch.func transform{place_of(node)}. "
                    f"{_advice(program)}"
                )


def _is_transform(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return module.startswith(_MODULE) and name != "lazy_load_decompositions"


def _advice(program: ExportedProgram) -> str:
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, constants)):
        return "torch.export itself bakes such tensors in as constants: it cannot export it"
    return (
        "Have torch.export resolve it, and give what comes out: "
        "amp_fx.export(torch.export.export(model, args).run_decompositions({}))"
    )


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

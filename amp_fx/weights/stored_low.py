"""Marks weights that ``store_low`` converted, to exclude them from the cache.

The mark is an attribute of the module that owns the weight. A mark on the tensor would be lost when
the module is copied, pickled or moved to another device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.dtypes import is_low
from amp_fx.errors import UnsupportedError
from amp_fx.weights.store import STORE
from amp_fx.weights.store import forget as drop
from amp_fx.weights.watch import engine

if TYPE_CHECKING:
    from collections.abc import Iterable

_ATTRIBUTE = "_amp_fx_stored_low"


def mark_stored(module: nn.Module, name: str) -> None:
    """Marks a parameter or buffer of a module. Steps of optimizers then reject the parameter."""
    vars(module)[_ATTRIBUTE] = frozenset((*stored_names(module), name))
    if isinstance(weight := getattr(module, name), nn.Parameter):
        _parameters[weight] = f"{type(module).__name__}.{name}"
        _watch_steps()


_parameters = WeakTensorKeyDictionary()
"""Names of the marked parameters. Copies of them are not included."""


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_reject_stored)


def _reject_stored(optimizer: Any, *_: Any) -> None:
    """Raises an error if an optimizer is about to update a marked parameter."""
    if torch.compiler.is_dynamo_compiling():
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = _parameters.get(param)  # type: ignore[no-untyped-call]
            if name is not None and param.grad is not None and is_low(param.dtype):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} would train {name}, which amp_fx.store_low has "
                    f"stored in {param.dtype} for inference, and updates smaller than its "
                    "precision would be lost: train the float32 model, or call model.float() first"
                )


def stored_names(module: nn.Module) -> frozenset[str]:
    """Returns the marked parameters and buffers of a module, without those of submodules."""
    names: frozenset[str] = vars(module).get(_ATTRIBUTE, frozenset())
    return names


def stored_tensors(modules: Iterable[Any]) -> set[int]:
    """Returns the identities of all marked tensors of modules and their submodules."""
    identities = set()
    for root in modules:
        for module in root.modules() if isinstance(root, nn.Module) else ():
            for name in stored_names(module):
                identities.add(id(module._parameters.get(name, module._buffers.get(name))))
    return identities


def forget(weight: torch.Tensor) -> None:
    """Drops the values of a weight and stops watching it."""
    if STORE.of_weight(weight) and weight.device.type != "meta":
        engine().unwatch(weight)
    drop(weight)

"""Marks weights that ``store_low`` converted, to exclude them from the cache.

The mark is an attribute of the module that owns the weight. A mark on the tensor would be lost when
the module is copied, pickled or moved to another device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from amp_fx.weights.engine import engine
from amp_fx.weights.store import STORE
from amp_fx.weights.store import forget as drop

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_ATTRIBUTE = "_amp_fx_stored_low"


def mark_stored(module: nn.Module, name: str) -> None:
    """Marks a parameter or buffer of a module."""
    vars(module)[_ATTRIBUTE] = frozenset((*stored_names(module), name))


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

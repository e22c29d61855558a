"""Marks weights that were stored low for the sake of memory: nothing is kept of them besides.

The mark is an attribute of the module that owns the weight, so that it outlives copies, pickles
and moves to another device, which make other tensors.
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
    """The marked parameters and buffers of a module, without those of modules inside."""
    found: frozenset[str] = vars(module).get(_ATTRIBUTE, frozenset())
    return found


def stored_tensors(modules: Iterable[Any]) -> set[int]:
    """Identities of all marked tensors of some modules, those inside included."""
    found = set()
    for root in modules:
        for module in root.modules() if isinstance(root, nn.Module) else ():
            for name in stored_names(module):
                found.add(id(module._parameters.get(name, module._buffers.get(name))))
    return found


def forget(weight: torch.Tensor) -> None:
    """Drops what is kept of a weight, and watches it no longer."""
    if STORE.of_weight(weight) and weight.device.type != "meta":
        engine().unwatch(weight)
    drop(weight)

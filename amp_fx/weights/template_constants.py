"""Records how inductor's C++ templates compute constants while they generate code.

With ``max_autotune``, inductor may choose a template instead of oneDNN's packed product. The
template blocks the weight for its kernel and adds the blocked weight to the code as a constant.
``TemplateConstants`` records the ops that compute such a constant, so that it can be recomputed
after a write to the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from amp_fx.graphs.purity import is_pure
from amp_fx.graphs.values import tensors_in
from amp_fx.torch_private.modes import TorchDispatchMode
from amp_fx.torch_private.pytree import tree_map_only

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.weights.prepare import Prepare


class TemplateConstants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops on constants as nodes of ``prepare``.

    Args:
        prepare: The graph of all ops that depend on weights alone.
    """

    def __init__(self, prepare: Prepare) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prepare = prepare
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, constant: torch.Tensor, node: fx.Node) -> None:
        """Records the node of ``prepare`` that computes a constant."""
        self._nodes[constant] = node

    def node_of(self, constant: torch.Tensor) -> fx.Node | None:
        """Returns the node that computes a constant; None if its ops were not recorded."""
        node: fx.Node | None = self._nodes.get(constant)  # type: ignore[no-untyped-call]
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        is_known = bool(tensors) and all(tensor in self._nodes for tensor in tensors)
        if is_known and isinstance(result, torch.Tensor):
            nodes = tree_map_only(torch.Tensor, self._nodes.__getitem__, (args, kwargs))
            node = self._prepare.call(func, *nodes)
            if is_pure(node):
                self._nodes[result] = node
        return result

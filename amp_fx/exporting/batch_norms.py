"""Folds batch norms into the weights of the convolutions before them, in captured programs.

Before:
    %conv = aten.conv2d(%x, %weight, None)
    %y    = aten.batch_norm(%conv, %scale, %shift, %mean, %var, False, 0.1, 1e-05, True)
After (the program gets other numbers for %weight and %shift):
    %y    = aten.conv2d(%x, %weight, %shift)

The weight is rounded once, after it is scaled. In a rewritten program, it would be rounded before
as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.values import storage_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, fx

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)
_FLOAT16_MAX = torch.finfo(torch.float16).max


def fold_batch_norms(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Folds batch norms in place.

    Left unchanged: convolutions with other readers, weights that are read elsewhere, and weights
    that float16 could not represent.

    Args:
        graph: A graph of ``torch.export``, without regions.
        tensors: The weights that the program does not write, by the names of their placeholders.

    Returns:
        The new numbers of weights, by the names of their placeholders.
    """
    num_readers: dict[int, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in tensors:
            key = storage_id(tensors[node.name])
            num_readers[key] = num_readers.get(key, 0) + len(node.users)
    alone = {
        name: tensor for name, tensor in tensors.items() if num_readers.get(storage_id(tensor)) == 1
    }
    folded: dict[str, Tensor] = {}
    for norm in graph.find_nodes(op="call_function", target=_aten.batch_norm.default):
        folded.update(_fold(norm, alone))
    return folded


def _fold(norm: fx.Node, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arguments: tuple[Any, ...] = norm.args
    convolution, scale, shift, mean, var, is_training, _, eps, *_ = arguments
    if is_training or getattr(convolution, "target", None) not in _CONVOLUTIONS:
        return {}
    assert isinstance(convolution, torch.fx.Node)
    _, weight, bias, *_ = (*convolution.args, None)
    nodes = [weight, scale, shift, mean, var, *([] if bias is None else [bias])]
    if len(convolution.users) > 1 or not all(getattr(n, "name", "") in tensors for n in nodes):
        return {}

    def exact(node: Any) -> Tensor:
        return tensors[node.name].detach().double()

    factor = exact(scale) * (exact(var) + eps).rsqrt()
    by_output = [-1] + [1] * (exact(weight).dim() - 1)
    new_weight = exact(weight) * factor.reshape(by_output)
    new_shift = (-exact(mean) if bias is None else exact(bias) - exact(mean)) * factor
    new_shift += exact(shift)
    if not all((t.abs() <= _FLOAT16_MAX).all() for t in (new_weight, new_shift)):
        return {}
    args = [*convolution.args, None] if len(convolution.args) == 2 else [*convolution.args]
    args[2] = shift
    convolution.args = tuple(args)
    norm.replace_all_uses_with(convolution)
    norm.graph.erase_node(norm)
    new = {weight: new_weight, shift: new_shift}
    return {node.name: value.to(tensors[node.name].dtype) for node, value in new.items()}

"""Counts the bytes that a process passes to the collectives of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.graphs.casts import op_name
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.policies.calls import bind
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    import torch
    from torch import fx

# Not ``wait_tensor``, which waits for the result of another collective and moves nothing.
_COLLECTIVES = frozenset(
    f"_c10d_functional::{op}{variant}"
    for op, variants in (
        ("all_gather_into_tensor", ("", "_coalesced", "_out")),
        ("all_reduce", ("", "_", "_coalesced", "_coalesced_")),
        ("all_to_all_single", ("",)),
        ("batch_p2p_ops", ("",)),
        ("broadcast", ("", "_")),
        ("isend", ("",)),
        ("reduce_scatter_tensor", ("", "_coalesced", "_out")),
    )
    for variant in variants
) | {"_dtensor::shard_dim_alltoall"}


def collective_bytes(graph: fx.Graph) -> int:
    """Returns the number of bytes that one process passes to the collectives of a graph."""
    nodes = [node for node in graph.nodes if op_name(node) in _COLLECTIVES]
    return sum(num_bytes(tensor) for node in nodes for tensor in _sent_tensors(node))


def _sent_tensors(node: fx.Node) -> list[torch.Tensor]:
    assert isinstance(node.target, OpOverload)
    arguments = bind(node.target, *argument_values(node))
    tensors = tensors_in([arguments.get(key) for key in ("input", "inputs", "tensor", "tensors")])
    if op_name(node) != "_c10d_functional::batch_p2p_ops":
        return tensors
    pairs = zip(arguments["op_list"], tensors, strict=True)
    return [tensor for op, tensor in pairs if op == "isend"]

"""Collectives in graphs of AOTAutograd, and how many bytes a rank sends by them.

Two sums of bytes are told apart: what a rank hands over, and what it sends to others where the
ranks make a ring, as libraries do with large tensors: the factors are those by which nccl-tests
makes its bus bandwidth (``doc/PERFORMANCE.md`` there). An ``all_gather`` of ``s`` bytes from each
of ``n`` ranks sends ``(n - 1) * s``, a ``reduce_scatter`` of ``s`` bytes ``(n - 1) / n * s``, an
``all_reduce`` twice that, as it is a ``reduce_scatter`` and an ``all_gather``; a ``broadcast``
passes all of ``s`` on. An ``all_to_all`` sends what is not for the rank itself.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.policies.calls import bind
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        node: Its node.
        op: What it calls, without namespace and overload.
        dtype: Of the tensors that it is given; None if there are none.
        group_size: How many ranks take part; 0 where that is not known.
        num_bytes: What this rank hands over.
        wire_bytes: What this rank sends to others in a ring; all of it where the group is unknown.
    """

    node: fx.Node
    op: str
    dtype: torch.dtype | None
    group_size: int
    num_bytes: int
    wire_bytes: int


def _gathered(size: int, ranks: int) -> int:
    return size * (ranks - 1)


def _scattered(size: int, ranks: int) -> int:
    return -(-size * (ranks - 1) // ranks)


def _reduced(size: int, ranks: int) -> int:
    return 2 * _scattered(size, ranks)


def _passed_on(size: int, ranks: int) -> int:
    return size if ranks > 1 else 0


_SENT: Mapping[str, Callable[[int, int], int]] = {
    f"_c10d_functional::{op}{variant}": sent
    for sent, op, variants in (
        (_gathered, "all_gather_into_tensor", ("", "_coalesced", "_out")),
        (_reduced, "all_reduce", ("", "_", "_coalesced", "_coalesced_")),
        (_scattered, "all_to_all_single", ("",)),
        (_passed_on, "broadcast", ("", "_")),
        (_passed_on, "isend", ("",)),
        (_passed_on, "batch_p2p_ops", ("",)),
        (_scattered, "reduce_scatter_tensor", ("", "_coalesced", "_out")),
    )
    for variant in variants
} | {"_dtensor::shard_dim_alltoall": _scattered}
"""What a rank sends, from the bytes that it hands over and the number of ranks."""


def collectives_in(graph: fx.Graph) -> Iterator[Collective]:
    """The collectives of a graph whose nodes have values, in order."""
    for node in graph.nodes:
        if op_name(node) in _SENT:
            yield _collective(node)


def op_name(node: fx.Node) -> str:
    """``aten::view``, whatever the overload; ``""`` for what is no op of PyTorch's."""
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


def _collective(node: fx.Node) -> Collective:
    name = op_name(node)
    assert isinstance(node.target, OpOverload)
    arguments = bind(node.target, *argument_values(node))
    tensors = _handed_over(name, arguments)
    size = sum(map(num_bytes, tensors))
    group = group_of(arguments.get("group_name"))
    ranks = group.size() if group is not None else int(arguments.get("group_size") or 0)
    sent = _SENT[name](size, ranks) if ranks else size
    splits = arguments.get("input_split_sizes")
    if group is not None and splits and all(isinstance(split, int) for split in splits):
        sent = size - size * splits[group.rank()] // max(sum(splits), 1)
    dtype = tensors[0].dtype if tensors else None
    return Collective(node, name.partition("::")[2], dtype, ranks, size, sent)


def _handed_over(name: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    tensors = tensors_in([arguments.get(key) for key in ("input", "inputs", "tensor", "tensors")])
    if name != "_c10d_functional::batch_p2p_ops":
        return tensors
    pairs = zip(arguments["op_list"], tensors, strict=True)
    return [tensor for op, tensor in pairs if op == "isend"]


def group_of(name: Any) -> Any:
    """Returns the process group of a collective; None if it is not known here.

    Relies on ``torch.distributed.distributed_c10d._resolve_process_group``.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if isinstance(name, torch.distributed.ProcessGroup):
        return name
    registry: Any = torch.distributed.distributed_c10d
    try:
        return registry._resolve_process_group(name)
    except Exception:  # noqa: BLE001 - it raises what its registry raises
        return None

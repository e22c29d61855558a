"""Narrows before it gathers: a cast that every reader of a gathered tensor makes goes before it.

Before:
    %whole = _c10d_functional.all_gather_into_tensor(%part, 2, "0")
    %wait  = _c10d_functional.wait_tensor(%whole)
    %low   = aten._to_copy(%wait, dtype=torch.bfloat16)
    %y     = aten.mm(%x, %low)
After:
    %narrow = aten._to_copy(%part, dtype=torch.bfloat16)
    %whole  = _c10d_functional.all_gather_into_tensor(%narrow, 2, "0")
    %wait   = _c10d_functional.wait_tensor(%whole)
    %y      = aten.mm(%x, %wait)

Half the bytes go over the wire, and no bit is another: such a collective moves elements only, and
so do the views between it and the casts. This pass runs on the graphs that AOTAutograd makes,
forward and backward each by itself. On a captured graph the cast would be differentiated, and
narrow what the backward adds up. Left alone on purpose: collectives that add (rounding does not
commute with that), and tensors that anything reads as they are, an output for the backward
among it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from amp_fx.graphs.collectives import collectives_in, op_name
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

MOVING = frozenset(
    (
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_gather_into_tensor_coalesced",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::broadcast",
        "_dtensor::shard_dim_alltoall",
    )
)
"""Collectives that move elements. ``permute_tensor`` is an ``all_to_all_single``."""

_VIEWS = (
    *("_reshape_alias", "_unsafe_view", "alias", "cat", "clone", "detach", "expand", "permute"),
    *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose"),
    *("unsqueeze", "view"),
)
CARRYING = frozenset(("_c10d_functional::wait_tensor", *(f"aten::{name}" for name in _VIEWS)))
"""What may stand between a collective and a cast: each element stays what it is."""


@dataclasses.dataclass(frozen=True)
class NarrowGathers:
    """Moves narrowing casts in front of collectives that move elements."""

    name: ClassVar[str] = "narrow_gathers"

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``gathers_narrowed``."""
        counts: Counter[str] = Counter()
        # The last first: what one gather reads may be what another has gathered.
        for gather in reversed([n for n in gm.graph.nodes if op_name(n) in MOVING]):
            region = _read_through(gather)
            if region is not None:
                _narrow(gm.graph, gather, *region)
                counts["gathers_narrowed"] += 1
        return PassResult(counts)


def wire_bytes(graph: fx.Graph) -> int:
    """Bytes that one process hands to the collectives of a graph."""
    return sum(each.num_bytes for each in collectives_in(graph))


def _read_through(gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """What carries a gathered tensor on, and the casts that read it; None if anything else does."""
    carriers: dict[fx.Node, None] = {}
    casts: dict[fx.Node, None] = {}
    waiting = [gather]
    while waiting:
        for user in waiting.pop().users:
            if narrows(user):
                casts[user] = None
            elif not _carries(user):
                return None
            elif user not in carriers:
                carriers[user] = None
                waiting.append(user)
    region = {gather, *carriers}
    if any(
        _is_tensor(given) and given not in region for c in carriers for given in c.all_input_nodes
    ):
        return None  # put together with something else
    if len({VALUE.of(cast).dtype for cast in casts}) != 1:
        return None
    return list(carriers), list(casts)


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(VALUE.get(node), (torch.SymInt, int))


def _carries(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    is_known = op_name(node) in CARRYING
    return is_known and "dtype" not in str(getattr(node.target, "_overloadname", ""))


def narrows(node: fx.Node) -> bool:
    """Whether a node is a plain cast to a dtype of fewer bytes."""
    value, source = VALUE.get(node), None
    if op_name(node) == "prims::convert_element_type" or _is_plain_copy(node):
        source = VALUE.get(node.all_input_nodes[0])
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    are_floats = value.is_floating_point() and source.is_floating_point()
    return are_floats and value.element_size() < source.element_size()


def _is_plain_copy(node: fx.Node) -> bool:
    if op_name(node) != "aten::_to_copy" or VALUE.get(node) is None:
        return False
    value, source = VALUE.of(node), VALUE.of(node.all_input_nodes[0])
    given = {key for key, argument in node.kwargs.items() if argument is not None}
    is_alike = value.device == source.device and value.stride() == source.stride()
    return "dtype" in given and is_alike


def _narrow(
    graph: fx.Graph, gather: fx.Node, carriers: list[fx.Node], casts: list[fx.Node]
) -> None:
    """Casts what is gathered, and takes the casts behind it away."""
    dtype = VALUE.of(casts[0]).dtype
    narrowed: dict[fx.Node, fx.Node] = {}
    for given in gather.all_input_nodes:
        if given not in narrowed and isinstance(VALUE.get(given), torch.Tensor):
            with graph.inserting_before(gather):
                narrowed[given] = narrowing_cast(graph, given, dtype, like=casts[0])
    for given, cast in narrowed.items():
        gather.replace_input_with(given, cast)
    changed = {gather, *carriers}
    for node in [node for node in graph.nodes if node in changed]:
        evaluate(node)
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        graph.erase_node(cast)


def narrowing_cast(
    graph: fx.Graph, given: fx.Node, dtype: torch.dtype, *, like: fx.Node
) -> fx.Node:
    """A cast of a node at the graph's insertion point; what it was widened from, if that is it."""
    if _is_widened_from(given, dtype):
        return given.all_input_nodes[0]
    if op_name(like) == "prims::convert_element_type":
        convert: Any = like.target
        cast = graph.call_function(convert, (given, dtype))
    else:
        cast = graph.call_function(torch.ops.aten._to_copy.default, (given,), {"dtype": dtype})
    cast.meta.update(
        {k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack")}
    )
    evaluate(cast)
    return cast


def _is_widened_from(node: fx.Node, dtype: torch.dtype) -> bool:
    if op_name(node) != "prims::convert_element_type" and not _is_plain_copy(node):
        return False
    source = VALUE.get(node.all_input_nodes[0])
    return isinstance(source, torch.Tensor) and source.dtype == dtype


def evaluate(node: fx.Node) -> None:
    """Gives a node the value that it has with its arguments as they are now."""
    args, kwargs = map_arg((node.args, node.kwargs), VALUE.get)
    with _fake_mode(args), torch.no_grad():
        value: Any = node.target(*args, **kwargs)  # type: ignore[operator]
    VALUE.put(node, value)
    if isinstance(value, torch.Tensor) and "tensor_meta" in node.meta:
        node.meta["tensor_meta"] = fx.passes.shape_prop._extract_tensor_metadata(value)


def _fake_mode(args: Any) -> Any:
    found = detect_fake_mode(pytree.tree_leaves(args))
    return found if found is not None else torch.no_grad()

"""Casts to fewer bytes in graphs that AOTAutograd makes: found, put elsewhere, and evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import VALUE

WHOLE_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("_reshape_alias", "_unsafe_view", "alias", "detach", "permute", "reshape"),
        *("squeeze", "t", "transpose", "unsqueeze", "view"),
    )
)
"""What gives all elements of one tensor, each once and, but for ``aten.view.dtype``, as it is."""


def is_whole_view(node: fx.Node) -> bool:
    """Whether a node is one of ``WHOLE_VIEWS``, and of the same dtype."""
    return op_name(node) in WHOLE_VIEWS and not is_reinterpreting(node)


def is_reinterpreting(node: fx.Node) -> bool:
    """Whether a view is of another dtype: ``aten.view.dtype``."""
    return "dtype" in str(getattr(node.target, "_overloadname", ""))


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

"""Creates, marks and recognizes cast nodes in captured graphs and in graphs of AOTAutograd."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.metadata import CAST, REMOVED_CASTS, VALUE
from amp_fx.graphs.records import Cast, RemovedCast
from amp_fx.graphs.sizes import num_elements
from amp_fx.graphs.values import version_of
from amp_fx.policies.calls import TO_COPY
from amp_fx.torch_private import pytree
from amp_fx.torch_private.fake_tensors import detect_fake_mode
from amp_fx.torch_private.ops import HigherOrderOperator, OpOverload

CAPTURED_DTYPE = "captured dtype"
"""Reason of casts to the captured dtype, for ops that reject mixtures of dtypes."""

CONVERT = torch.ops.prims.convert_element_type.default
"""The cast op in graphs of AOTAutograd."""

KERNEL_RESULT = "result of a kernel"
"""Reason of casts after an opaque node, to the dtype that eager autocast returns."""


# Note [Sharing casts]
# ~~~~~~~~~~~~~~~~~~~~
# Whether two ops share a cast decides the bits of gradients. Two uses of one cast add their
# gradients in the low dtype, before the backward of the cast. Two casts add them in the dtype of
# their source, after it. A forward has the same bits either way.
#
# Eager autocast shares one kind of cast: that of a float32 leaf that requires gradients, to the
# low dtype of the region, unless ``cache_enabled=False`` (``cached_cast`` in
# ``ATen/autocast_mode.cpp``). Before differentiation, the passes share exactly these casts, within
# a graph (``fold_casts``) and between a graph and the bodies of its higher-order ops
# (``hoist_casts``). In a branch of ``cond``, eager autocast shares none, because the backward of a
# branch is traced with the cache off.
#
# Casts that autograd does not record are all shared. After differentiation, AOTAutograd merges
# equal casts: gradients are nodes then, and stay as they are.


def is_cacheable(tensor: torch.Tensor) -> bool:
    """Returns True if eager autocast may cache casts of a tensor: it is a float32 leaf and no view.

    It must require gradients, too. See Note [Sharing casts].
    """
    return tensor.dtype is torch.float32 and tensor.is_leaf and not tensor._is_view()


def mark_cast(node: fx.Node, reason: str) -> None:
    """Marks a node as an inserted cast; its source must have a value."""
    source = VALUE.of(node.all_input_nodes[0])
    dtype = node.kwargs["dtype"]
    assert isinstance(dtype, torch.dtype)
    CAST.put(node, Cast(source.dtype, dtype, version_of(source), reason))


def add_cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, reason: str) -> fx.Node:
    """Inserts a cast at the graph's insertion point; the caller evaluates it."""
    node = graph.create_node(
        "call_function", TO_COPY, (source,), {"dtype": dtype}, name=cast_name(source, dtype)
    )
    node.meta.update({k: source.meta[k] for k in ("stack_trace", "site") if k in source.meta})
    mark_cast(node, reason)
    return node


def inserted_cast(node: fx.Node) -> Cast | None:
    """Returns the description of an inserted cast; None for any other node."""
    return CAST.get(node)


def replace_cast(node: fx.Node, by: fx.Node, why: str) -> None:
    """Replaces a cast by an equal node, which remembers an inserted cast for explanations.

    Args:
        node: The node to erase: a cast, or any other node that is not remembered.
        by: The node that its readers get instead.
        why: The reason.
    """
    removed = (*(REMOVED_CASTS.get(by) or ()), *(REMOVED_CASTS.get(node) or ()))
    cast = inserted_cast(node)
    if cast is not None:
        source, readers = node.all_input_nodes[0].name, tuple(user.name for user in node.users)
        size = num_elements(VALUE.of(node))
        removed = (*removed, RemovedCast(node.name, source, cast, readers, size, why))
    if removed:
        REMOVED_CASTS.put(by, removed)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def cast_name(source: fx.Node, dtype: torch.dtype) -> str:
    """Returns a name such as ``weight_bfloat16``."""
    return f"{source.name}_{dtype_name(dtype)}"


# Neither float16 nor bfloat16 contains the other: one has fewer exponents, the other fewer digits.
_LOSSLESS = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def is_widening(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns True if a cast from ``source`` to ``target`` is lossless."""
    return target in _LOSSLESS.get(source, ())


def op_name(node: fx.Node) -> str:
    """Returns the name of an op, without its overload; ``""`` for nodes that call no op.

    For example, ``"aten::view"``, or ``"cond"`` of a higher-order op.
    """
    if isinstance(node.target, HigherOrderOperator):
        return str(node.target.name())  # type: ignore[no-untyped-call]
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


def op_names(gm: fx.GraphModule) -> set[str]:
    """Returns the names of all ops in a graph and in the bodies inside it."""
    return {op_name(node) for graph in graphs_in(gm) for node in graph.nodes}


WHOLE_VIEWS = frozenset(
    {
        "aten::_reshape_alias",
        "aten::_unsafe_view",
        "aten::alias",
        "aten::detach",
        "aten::permute",
        "aten::reshape",
        "aten::squeeze",
        "aten::t",
        "aten::transpose",
        "aten::unsqueeze",
        "aten::view",
    }
)
"""Ops whose result contains each element of one tensor exactly once."""


def is_whole_view(node: fx.Node) -> bool:
    """Returns True if a node is one of ``WHOLE_VIEWS`` and does not change the dtype."""
    return op_name(node) in WHOLE_VIEWS and not is_reinterpreting(node)


def is_reinterpreting(node: fx.Node) -> bool:
    """Returns True if a view reinterprets the bits in another dtype (``aten.view.dtype``)."""
    return "dtype" in str(getattr(node.target, "_overloadname", ""))


def is_narrowing_cast(node: fx.Node) -> bool:
    """Returns True if a node is a plain cast to a smaller dtype."""
    value, source = VALUE.get(node), _cast_value(node)
    if not isinstance(value, torch.Tensor) or source is None:
        return False
    are_floats = value.is_floating_point() and source.is_floating_point()
    return are_floats and value.element_size() < source.element_size()


def _is_plain_copy(node: fx.Node) -> bool:
    if op_name(node) != "aten::_to_copy" or VALUE.get(node) is None:
        return False
    value, source = VALUE.of(node), VALUE.of(node.all_input_nodes[0])
    # ``_to_copy`` can also change the device or the strides, which a cast of its result does not
    # undo.
    has_dtype = node.kwargs.get("dtype") is not None
    return has_dtype and value.device == source.device and value.stride() == source.stride()


def narrowing_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
    """Returns a node cast to a smaller dtype, at the graph's insertion point.

    If the node is itself a cast from that dtype, returns the source of the node.

    Args:
        graph: The graph of the node.
        node: The node to cast.
        dtype: The dtype of the result.
        like: An existing cast, whose op and provenance are copied.
    """
    source = _cast_value(node)
    # Widening loses nothing, so narrowing to the same dtype returns the original.
    if source is not None and source.dtype == dtype:
        return node.all_input_nodes[0]
    if op_name(like) == "prims::convert_element_type":
        convert: Any = like.target
        cast = graph.call_function(convert, (node, dtype))
    else:
        cast = graph.call_function(TO_COPY, (node,), {"dtype": dtype})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            cast.meta[key] = like.meta[key]
    record_value(cast)
    return cast


def _cast_value(node: fx.Node) -> torch.Tensor | None:
    """Returns the value of a plain cast's source; None for any other node."""
    if op_name(node) != "prims::convert_element_type" and not _is_plain_copy(node):
        return None
    source = VALUE.get(node.all_input_nodes[0])
    return source if isinstance(source, torch.Tensor) else None


def record_value(node: fx.Node) -> None:
    """Computes and records the value of a node of AOTAutograd's graph."""
    args, kwargs = map_arg((node.args, node.kwargs), VALUE.get)
    fake_mode: Any = detect_fake_mode(pytree.tree_leaves(args))
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        value: Any = node.target(*args, **kwargs)  # type: ignore[operator]
    VALUE.put(node, value)
    if isinstance(value, torch.Tensor) and "tensor_meta" in node.meta:
        node.meta["tensor_meta"] = fx.passes.shape_prop._extract_tensor_metadata(value)


def add_call(graph: fx.Graph, op: Any, *args: Any) -> fx.Node:
    """Adds a call and its value to a graph of AOTAutograd, at the graph's insertion point."""
    node = graph.call_function(op, args)
    record_value(node)
    return node

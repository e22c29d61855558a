"""Cast nodes: how they are made, marked and recognised.

In graphs that AOTAutograd makes, casts to fewer bytes are found, put elsewhere, and evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import CAST, VALUE
from amp_fx.graphs.values import value_of, version_of
from amp_fx.policies.calls import CAST as _OP
from amp_fx.torch_private import pytree
from amp_fx.torch_private.fake_tensors import detect_fake_mode

CAPTURED_DTYPE = "captured dtype"
"""The reason of casts back to what capture saw, for an op that takes no mixture."""

CONVERT = torch.ops.prims.convert_element_type.default
"""The cast in graphs that AOTAutograd makes."""

KERNEL_RESULT = "result of a kernel"
"""The reason of casts after an island: they say what eager autocast gives there."""


@dataclasses.dataclass(frozen=True)
class Cast:
    """Describes a cast that a pass inserted; ``metadata.CAST``.

    Attributes:
        source_dtype: Dtype of the tensor that is cast.
        dtype: Dtype that it is cast to.
        source_version: The source's version counter where the cast stands: two casts of
            one node are equal only if no write came between. None if it has none.
        reason: Why it is there: the op that wanted it, ``"output"``, or one of
            the constants above.
    """

    source_dtype: torch.dtype
    dtype: torch.dtype
    source_version: tuple[int, int] | None
    reason: str


def is_cast_call(node: fx.Node) -> bool:
    """Returns True if a node makes a cast as ``make_cast`` does."""
    return node.op == "call_function" and node.target is _OP


def mark_cast(node: fx.Node, reason: str) -> None:
    """Records that a pass put this cast in; its source must have a value."""
    source = value_of(node.all_input_nodes[0])
    dtype = node.kwargs["dtype"]
    assert isinstance(dtype, torch.dtype)
    CAST.put(node, Cast(source.dtype, dtype, version_of(source), reason))


def inserted_cast(node: fx.Node) -> Cast | None:
    """The record of a cast that a pass inserted; None for any other node."""
    return CAST.get(node)


def add_cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, reason: str) -> fx.Node:
    """Inserts a cast at the graph's insertion point; the caller evaluates it."""
    node = graph.create_node(
        "call_function", _OP, (source,), {"dtype": dtype}, name=cast_name(source, dtype)
    )
    node.meta.update({k: source.meta[k] for k in ("stack_trace", "site") if k in source.meta})
    mark_cast(node, reason)
    return node


def cast_name(source: fx.Node, dtype: torch.dtype) -> str:
    """A readable name: the source's and the dtype's, ``weight_bfloat16``."""
    return f"{source.name}_{dtype_name(dtype)}"


_LOSSLESS = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def is_widening(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns True if every value of one dtype has the same value in the other."""
    return target in _LOSSLESS.get(source, ())


WHOLE_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("_reshape_alias", "_unsafe_view", "alias", "detach", "permute", "reshape"),
        *("squeeze", "t", "transpose", "unsqueeze", "view"),
    )
)
"""What gives all elements of one tensor, each once and, but for ``aten.view.dtype``, as it is."""


def is_whole_view(node: fx.Node) -> bool:
    """Returns True if a node is one of ``WHOLE_VIEWS``, and of the same dtype."""
    return op_name(node) in WHOLE_VIEWS and not is_reinterpreting(node)


def is_reinterpreting(node: fx.Node) -> bool:
    """Returns True if a view is of another dtype: ``aten.view.dtype``."""
    return "dtype" in str(getattr(node.target, "_overloadname", ""))


def narrows(node: fx.Node) -> bool:
    """Returns True if a node is a plain cast to a dtype of fewer bytes."""
    value, source = VALUE.get(node), _cast_value(node)
    if not isinstance(value, torch.Tensor) or source is None:
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
    source = _cast_value(given)
    if source is not None and source.dtype == dtype:
        return given.all_input_nodes[0]
    if op_name(like) == "prims::convert_element_type":
        convert: Any = like.target
        cast = graph.call_function(convert, (given, dtype))
    else:
        cast = graph.call_function(torch.ops.aten._to_copy.default, (given,), {"dtype": dtype})
    kept = ("stack_trace", "nn_module_stack")
    cast.meta.update({key: like.meta[key] for key in kept if key in like.meta})
    evaluate(cast)
    return cast


def _cast_value(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a plain cast takes; None for any other node."""
    if op_name(node) != "prims::convert_element_type" and not _is_plain_copy(node):
        return None
    source = VALUE.get(node.all_input_nodes[0])
    return source if isinstance(source, torch.Tensor) else None


def evaluate(node: fx.Node) -> None:
    """Gives a node the value that it has with its arguments as they are now."""
    args, kwargs = map_arg((node.args, node.kwargs), VALUE.get)
    fake_mode: Any = detect_fake_mode(pytree.tree_leaves(args))
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        value: Any = node.target(*args, **kwargs)  # type: ignore[operator]
    VALUE.put(node, value)
    if isinstance(value, torch.Tensor) and "tensor_meta" in node.meta:
        node.meta["tensor_meta"] = fx.passes.shape_prop._extract_tensor_metadata(value)

"""Cast nodes: how they are made, marked and recognised."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.metadata import CAST
from amp_fx.graphs.values import value_of, version_of
from amp_fx.policies.calls import CAST as _OP

if TYPE_CHECKING:
    from torch import fx

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
    """Whether a node makes a cast as ``make_cast`` does."""
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
    """Whether every value of one dtype has the same value in the other."""
    return target in _LOSSLESS.get(source, ())

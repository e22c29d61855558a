"""Preconditions and postconditions of passes, which the runner checks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from amp_fx.graphs.casts import CAPTURED_DTYPE, KERNEL_RESULT, inserted_cast
from amp_fx.graphs.markers import MARKERS
from amp_fx.graphs.metadata import CAPTURED, HAS_REWRITTEN_BODIES, OPAQUE, SITE, VALUE
from amp_fx.graphs.values import (
    adopt_captured,
    analysis,
    argument_values,
    call_on_fakes,
    detect_fake_mode,
    storage_id,
    tensors_in,
)
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

_CALLS = ("call_function", "call_method")


@dataclasses.dataclass(frozen=True)
class Condition:
    """Predicate that must hold for every node of a graph."""

    text: str
    holds: Callable[[fx.Node], bool] = dataclasses.field(repr=False)


SITES_KNOWN = Condition("every node knows its region and grad mode", SITE.is_on)
"""Postcondition of ``mark_regions``."""

VALUES_KNOWN = Condition(
    "every call has a value",
    lambda node: node.op not in _CALLS or node.target in MARKERS or VALUE.is_on(node),
)
"""Postcondition of ``insert_casts`` and all later passes."""


def check_graph(gm: fx.GraphModule, pass_name: str) -> None:
    """Checks a graph after ``insert_casts`` or a later pass, or a graph of AOTAutograd.

    Raises:
        AssertionError: The graph does not lint, the recorded value of a node is wrong, or an
            inserted cast is redundant: its source is another cast or already has the dtype.
    """
    try:
        gm.graph.lint()
    except Exception as error:
        raise AssertionError(f"after {pass_name}: the graph does not lint: {error}") from error
    fake_mode = detect_fake_mode(gm.graph)
    fresh: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        _check_cast(node, pass_name)
        if node.op in _CALLS and _can_evaluate(node):
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda n: fresh[n] if n in fresh else VALUE.get(n)
            )
            site = SITE.get(node)  # graphs of AOTAutograd have none, and run without gradients
            with analysis(fake_mode, is_grad_enabled=site is not None and site.is_grad_enabled):
                value = adopt_captured(CAPTURED.get(node), call_on_fakes(node, args, kwargs))
                fresh[node] = _with_strides(value, VALUE.get(node), tensors_in(args, kwargs))
    # Compared at the end, because ops such as ``unsqueeze_`` change the shapes of earlier values,
    # both recorded and fresh.
    for node, value in fresh.items():
        _check_value(node, value, pass_name)


def _with_strides(value: Any, recorded: Any, operands: Sequence[torch.Tensor]) -> Any:
    """Gives the result of an op that allocates its memory the recorded strides.

    Passes may lay out what a convolution reads in another way, which changes its strides. Inductor
    copies for a view that does not fit them, but a view on fake tensors raises an error.
    """
    memory = {storage_id(operand) for operand in operands}

    def restride(new: Any, old: Any) -> Any:
        are_strided = all(
            isinstance(t, torch.Tensor) and t.layout is torch.strided for t in (new, old)
        )
        if not are_strided or new.dim() != old.dim() or new.stride() == old.stride():
            return new
        is_view = storage_id(new) in memory
        return new if is_view else new.new_empty_strided(new.shape, old.stride())

    are_several = isinstance(value, (tuple, list)) and isinstance(recorded, (tuple, list))
    if are_several and len(value) == len(recorded):
        return [restride(new, old) for new, old in zip(value, recorded, strict=True)]
    return restride(value, recorded)


def _can_evaluate(node: fx.Node) -> bool:
    is_hop = isinstance(node.target, HigherOrderOperator)
    if not VALUE.is_on(node) or OPAQUE.is_on(node) or HAS_REWRITTEN_BODIES.is_on(node) or is_hop:
        return False
    if not all(VALUE.is_on(source) for source in node.all_input_nodes):
        return False  # it reads a packed weight, which has no fake tensor
    return bool(tensors_in(*argument_values(node)))


def _check_value(node: fx.Node, fresh: Any, pass_name: str) -> None:
    recorded = [(t.dtype, t.dim(), t.device) for t in tensors_in(VALUE.get(node))]
    actual = [(t.dtype, t.dim(), t.device) for t in tensors_in(fresh)]
    if recorded != actual:
        raise AssertionError(
            f"after {pass_name}: {node.format_node()} produces {actual}, "
            f"but its meta['val'] contains {recorded}"
        )


_FORCED = (CAPTURED_DTYPE, KERNEL_RESULT)
"""Reasons of casts that represent part of an op, so that another cast may follow."""


def _check_cast(node: fx.Node, pass_name: str) -> None:
    cast = inserted_cast(node)
    if cast is None:
        return
    source = node.all_input_nodes[0]
    if cast.dtype == cast.source_dtype:
        raise AssertionError(
            f"after {pass_name}: {node} casts to {cast.dtype}, which is the dtype of {source}"
        )
    inner = inserted_cast(source)
    if inner is not None and inner.dtype == cast.source_dtype and inner.reason not in _FORCED:
        raise AssertionError(f"after {pass_name}: {node} casts {source}, which is a cast")

"""Floating-point operations of a graph's nodes, by PyTorch's own formulas."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from amp_fx.graphs.decompose import NotPlainError, call_key
from amp_fx.graphs.values import analysis, argument_values, call_target, tensors_in

if TYPE_CHECKING:
    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode


class FlopMeter:
    """Counts the operations of single nodes on fake tensors; equal calls are counted once.

    Args:
        fake_mode: The fake mode of the nodes' values.
    """

    def __init__(self, fake_mode: FakeTensorMode | None) -> None:
        self._fake_mode = fake_mode
        self._memo: dict[Any, int] = {}

    def count(self, node: fx.Node) -> int:
        """The operations of one call of a node; 0 where they cannot be counted."""
        if self._fake_mode is None or not _may_count(node):
            return 0
        try:
            key = call_key(node, node.all_input_nodes)
        except NotPlainError:
            return self._measure(node)
        if key not in self._memo:
            self._memo[key] = self._measure(node)
        return self._memo[key]

    def _measure(self, node: fx.Node) -> int:
        args, kwargs = argument_values(node)
        with contextlib.ExitStack() as stack:
            stack.enter_context(analysis(self._fake_mode, is_grad_enabled=False))
            counter = stack.enter_context(FlopCounterMode(display=False))
            try:
                call_target(node, args, kwargs)
            except Exception:  # noqa: BLE001 - islands may not run out of their place
                return 0
        return int(counter.get_total_flops())


def _may_count(node: fx.Node) -> bool:
    """Whether a node's call may multiply matrices and can be made once more."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    args, kwargs = argument_values(node)
    # Every formula is for an op of at least two tensors: products, convolutions, attention.
    return len(tensors_in(args, kwargs)) > 1

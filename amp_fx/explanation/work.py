"""What a graph's nodes have to do: operations, by PyTorch's own formulas, and bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from amp_fx.graphs.bodies import is_rewritten
from amp_fx.graphs.decompose import NotPlainError, call_key
from amp_fx.graphs.islands import native_autocast
from amp_fx.graphs.metadata import ISLAND, VALUE
from amp_fx.graphs.traffic import Moved, TrafficMode, tensor_bytes
from amp_fx.graphs.values import analysis, argument_values, call_target, recorded_value, tensors_in
from amp_fx.weights.kept_cast import kept_cast

if TYPE_CHECKING:
    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode


class Work(NamedTuple):
    """What one call of a node has to do.

    Attributes:
        flops: Floating-point operations.
        moved: Bytes that it reads and writes.
        is_counted: Whether it could be counted.
    """

    flops: int = 0
    moved: Moved = Moved()
    is_counted: bool = True


NOTHING = Work()
"""Of a view, say."""
UNKNOWN = Work(is_counted=False)
"""Of what cannot be called by itself."""


class WorkMeter:
    """Calls single nodes on fake tensors and counts what they do; equal calls are counted once."""

    def __init__(self, fake_mode: FakeTensorMode | None) -> None:
        self._fake_mode = fake_mode
        self._memo: dict[Any, Work] = {}

    def measure(self, node: fx.Node) -> Work:
        """What one call of a node does."""
        if node.op not in ("call_function", "call_method") or node.target is kept_cast:
            return NOTHING
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return _at_its_border(node)
        if not tensors_in([recorded_value(n) for n in (node, *node.all_input_nodes)]):
            return NOTHING
        if self._fake_mode is None or any(not VALUE.is_on(n) for n in node.all_input_nodes):
            return UNKNOWN
        try:
            key = call_key(node, node.all_input_nodes)
        except NotPlainError:
            return self._call(node)
        if ISLAND.is_on(node):
            return self._call(node)
        if key not in self._memo:
            self._memo[key] = self._call(node)
        return self._memo[key]

    def _call(self, node: fx.Node) -> Work:
        traffic, counter = TrafficMode(), FlopCounterMode(display=False)
        may_multiply = _may_multiply(node)
        with contextlib.ExitStack() as stack:
            if ISLAND.is_on(node):
                stack.enter_context(native_autocast(node, self._fake_mode))
                stack.enter_context(torch.no_grad())
            else:
                stack.enter_context(analysis(self._fake_mode, is_grad_enabled=False))
            try:
                given = argument_values(node)
                args, kwargs = pytree.tree_map_only(torch.Tensor, torch.detach, given)
                if may_multiply:
                    stack.enter_context(counter)
                stack.enter_context(traffic)
                call_target(node, args, kwargs)
            except Exception:  # noqa: BLE001 - neither islands nor bodies of vmap may run elsewhere
                return UNKNOWN
        flops = int(counter.get_total_flops()) if may_multiply else 0
        return Work(flops, traffic.moved)


def _at_its_border(node: fx.Node) -> Work:
    """What a higher-order op takes and gives, if its bodies are not read by themselves."""
    if is_rewritten(node):
        return NOTHING
    given = tensors_in([recorded_value(n) for n in node.all_input_nodes])
    made = tensors_in(recorded_value(node))
    return Work(0, Moved(sum(map(tensor_bytes, given)), sum(map(tensor_bytes, made))))


def _may_multiply(node: fx.Node) -> bool:
    """Every formula is for an op of at least two tensors: products, convolutions, attention."""
    args, kwargs = argument_values(node)
    return len(tensors_in(args, kwargs)) > 1

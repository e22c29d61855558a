"""Multiplies gradients by the errors of ops, which gives their effects on the loss."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from amp_fx.numerics.measures import add_effect
from amp_fx.observe.ops import below_everything, is_custom, is_tracked, number_of
from amp_fx.observe.recorder import Sink

if TYPE_CHECKING:
    import torch

    from amp_fx.numerics.records import OutputError
    from amp_fx.numerics.twin import Twin


class Effects(Sink):
    """Registers hooks on the graph of each backward, whoever calls it.

    Args:
        twin: It has the errors of ops, by the numbers of their nodes of autograd.

    Attributes:
        roots: The values in the reference with which backwards began.
        has_reentrant: True if a backward of a node runs another one.
    """

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._hooked: set[int] = set()
        self.roots: list[float] = []
        self.has_reentrant = False

    def root(self, root: torch.Tensor) -> None:
        """Registers the hooks of one backward."""
        exact = self._twin.shadows.of(root.detach()).sum() if is_tracked(root) else math.nan
        self.roots.append(float(exact))
        nodes = self._new_nodes(root)
        for node in nodes.values():
            self.has_reentrant |= node.name() in _REENTRANT
            self._leave_out_custom(node)
        for number, errors in self._twin.output_errors.items():
            found = nodes.get(number)
            if found is None and errors[0].is_written:
                found = _node_of_write(nodes, number, is_view=errors[0].geometry is not None)
            if found is not None:
                found.register_prehook(functools.partial(self._add, errors))

    def _new_nodes(self, root: torch.Tensor) -> dict[int, Any]:
        """Returns nodes above a root that no earlier root has reached, by their numbers."""
        found: dict[int, Any] = {}
        pending: list[Any] = [root.grad_fn]
        while pending:
            node = pending.pop()
            is_leaf = node is None or (hasattr(node, "variable") and not node.next_functions)
            if not is_leaf and number_of(node) not in self._hooked:
                self._hooked.add(number_of(node))
                found[number_of(node)] = node
                pending += [following for following, _ in node.next_functions]
        return found

    def _leave_out_custom(self, node: Any) -> None:
        if is_custom(node) and node.name() not in _PASSING:
            module = self.recorder.location_of(number_of(node)).module
            why = "the effect of ops inside of a custom function on the loss is unknown"
            self._twin.leave_out(node.name().removesuffix("Backward"), module, why)

    def _add(self, errors: list[OutputError], gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Adds the effects of the errors of an op, given the gradients of its results."""
        with self.recorder.paused(), below_everything():
            for position, gradient in enumerate(gradients):
                if gradient is None or not is_tracked(gradient):
                    continue
                exact = self._twin.shadows.of(gradient)
                for error in errors:
                    if error.position == position or error.geometry is not None:
                        self._add_one(error, gradient, exact)

    def _add_one(self, error: OutputError, gradient: torch.Tensor, exact: torch.Tensor) -> None:
        shadow = error.part_of(exact)
        low = shadow if exact is gradient else error.part_of(gradient)
        if low is None or shadow is None:
            return

        def add(effect: float, square: float) -> None:
            record = error.record
            if not record.local_sq and not error.is_of_constant:
                return  # an exact op
            record.effect = (record.effect or 0.0) + effect
            record.effect_sq += square

        add_effect(self._twin.readings, low, shadow, error.eps, add)


_REENTRANT = ("CheckpointFunctionBackward",)
_PASSING = ("BackwardHookFunctionBackward",)
"""Custom functions of torch that return their inputs, so that hooks run."""


def _node_of_write(nodes: dict[int, Any], number: int, *, is_view: bool) -> Any:
    """Returns the node of an op that writes in place, which was not the latest as the op ran.

    Relies on autograd creating the copy of an overwritten tensor after the op's node, and the
    ``CopySlices`` of a view's base after the write.
    """
    if is_view:
        found = nodes.get(number + 1)
        return found if found is not None and found.name().endswith("CopySlices") else None
    return nodes.get(number - 1)

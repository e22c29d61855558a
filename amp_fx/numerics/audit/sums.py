"""Findings about sums: gradients and collectives that add in a low dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.collectives import group_of
from amp_fx.numerics.audit.recording import COLLECTIVES, LEAF, Rule, is_below_float32
from amp_fx.numerics.audit.report import new_finding
from amp_fx.observe.ops import is_custom
from amp_fx.observe.places import frames_above
from amp_fx.observe.storages import Marks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.observe.recorder import Event


class GradientRule(Rule):
    """Finds ``gradient_sum_low``.

    Autograd adds the gradients of several uses of a tensor before the node that made the tensor
    runs: for a weight, the cast of autocast, or the leaf itself.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = {id(weight) for weight in weights}
        self._num_terms: Marks[int] = Marks()
        self._first_use: dict[int, NodeLocation] = {}
        self._found: dict[tuple[int, str], Finding] = {}

    def forward(self, event: Event) -> None:
        """Notes the first use of each leaf."""
        for tensor in event.tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._first_use.setdefault(id(tensor), event.location)

    def backward(self, event: Event) -> None:
        """Examines the ops that add, and those that write gradients."""
        if not event.floats:
            return
        is_add = event.name == "add" and len(event.floats) == 2
        is_add = is_add and event.floats[0].shape == event.floats[1].shape
        is_add = is_add and all(is_below_float32(tensor.dtype) for tensor in event.floats)
        if event.node.name() == LEAF:
            self._see_leaf(event, event.node.variable, is_add=is_add)
        elif is_add:
            self._add_terms(event)
        elif event.name == "_to_copy" and event.node.name().startswith("ToCopyBackward"):
            following = event.node.next_functions[0][0]
            if following is not None and following.name() == LEAF:
                self._see_uses(event, following.variable)

    def _see_uses(self, event: Event, variable: torch.Tensor) -> None:
        """Reports a sum of gradients of several uses that reaches a leaf.

        The sum of two rounds once, which every op in the low dtype does.
        """
        if (self._num_terms.get(event.floats[0]) or 1) > 2:
            self._add(event.floats[0], variable, "uses")

    def _see_leaf(self, event: Event, variable: torch.Tensor, *, is_add: bool) -> None:
        if is_add and event.op._schema.is_mutable:
            self._add_terms(event)
            self._add(event.results[0], variable, "micro-batches")
        elif not is_add:
            self._see_uses(event, variable)

    def _add_terms(self, event: Event) -> None:
        """Counts the gradients in a sum, whose terms may be sums themselves."""
        number = sum(self._num_terms.get(term) or 1 for term in event.floats)
        self._num_terms.put(event.results[0], number)

    def _add(self, low: torch.Tensor, variable: torch.Tensor, what: str) -> None:
        if id(variable) not in self._weights and not isinstance(variable, torch.nn.Parameter):
            return  # an input of the step
        name = self.recorder.places.path_of(variable)
        site = self._first_use.get(id(variable)) if what == "uses" else None
        message = (
            f"The gradients of {self._num_terms.get(low)} {what} of {name} are added in "
            f"{dtype_name(low.dtype)}: {_error_of(low.dtype)}."
        )
        found_now = new_finding("gradient_sum_low", site or self.recorder.here(), message)
        self._found[id(variable), what] = found_now

    def findings(self) -> Iterator[Finding]:
        """Yields the sums that were found."""
        yield from self._found.values()


def _error_of(dtype: torch.dtype) -> str:
    return f"each addition is off by up to {torch.finfo(dtype).eps / 2:.2%}"


class CollectiveRule(Rule):
    """Finds ``reduction_low``."""

    def forward(self, event: Event) -> None:
        """Examines a collective."""
        namespace = event.op.namespace
        if namespace not in COLLECTIVES or "reduce" not in event.name or not event.floats:
            return
        tensor = event.floats[0]
        size = _group_size(event.args)
        if not is_below_float32(tensor.dtype) or size == 1 or not _is_sum(event.args):
            return
        number = sum(each.numel() for each in event.floats)
        ranks = f"{size} ranks" if size else "the ranks"
        message = (
            f"{event.name} adds {number} values of {ranks} in {dtype_name(tensor.dtype)}: "
            f"{_error_of(tensor.dtype)}."
        )
        is_known = event.location.file and not is_custom(event.node)
        site = event.location if is_known else self.recorder.here()
        self.found.append(new_finding("reduction_low", site, message))

    backward = forward


def _is_sum(args: tuple[Any, ...]) -> bool:
    """Returns False for the largest or smallest element, which are exact.

    Ops of torch 2.13 have the reduction as an object that cannot be read. Functions of
    ``torch.distributed`` have it as their argument ``op``.
    """
    file = torch.distributed.distributed_c10d.__file__
    for frame in frames_above():
        if frame.f_code.co_filename == file and "op" in frame.f_locals:
            exact = (torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp.MIN)
            return frame.f_locals["op"] not in exact
    return not any(arg in ("max", "min") for arg in args if isinstance(arg, str))


def _group_size(args: tuple[Any, ...]) -> int:
    """Returns the number of ranks; 0 if it is not known."""
    groups: Any = torch.distributed.ProcessGroup
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return int(groups.unbox(arg).size())
    names = [arg for arg in args if isinstance(arg, str)]
    group = group_of(names[-1]) if names else None
    return 0 if group is None else int(group.size())

"""Runs a program with a shadow in the reference precision underneath, op by op.

The mode stands below autograd and autocast: it sees casts, views, writes in place, and the
backward, in eager code of any kind. Each op that meets a low dtype runs up to three times
(``calls.py``). What cannot be run again is listed as not examined.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.numerics.calls import ShadowedCall
from amp_fx.numerics.places import CallNotes, Places, Site, is_inside
from amp_fx.numerics.repeat import facts_of, tensors_in
from amp_fx.numerics.shadow import Shadows, is_tracked, is_wrapped
from amp_fx.numerics.torch_private import (
    address_of,
    is_custom,
    latest_node_number,
    number_of,
    running_node,
)

if TYPE_CHECKING:
    from types import FrameType

    from amp_fx.numerics.seen import Rounding, Seen
    from amp_fx.numerics.state import StateGuard


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs everything under it with a shadow."""

    supports_higher_order_operators = True

    def __init__(
        self,
        reference: torch.dtype,
        guard: StateGuard,
        modules: tuple[str, ...] | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows = Shadows(reference)
        self.notes = CallNotes()
        self.places = Places(self.notes)
        self.seen: list[Seen] = []
        self.not_examined: dict[tuple[str, str], str] = {}
        self.roundings: dict[int, list[Rounding]] = {}
        self.roots: list[float] = []
        """What the step itself has called ``backward`` of, in the reference."""
        self.num_healed = 0
        self.is_paused = False
        self.guard = guard
        self.reference = reference
        self._modules = modules
        self.is_brief = is_brief
        self._site_of: dict[int, Site] = {}
        self._last_number = latest_node_number()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one op."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        wrapped = next(filter(is_wrapped, tensors), None)
        if wrapped is not None:
            why = "what ops on the tensors that it consists of do to the loss is not known"
            self.leave_out(type(wrapped).__name__, self.places.here("").module, why)
            self.guard.has_wrappers = True
            return NotImplemented  # it calls ops on these
        if self.guard.is_aside(tensors):
            return func(*args, **kwargs)
        self.guard.look_at(tensors)
        if not isinstance(func, torch._ops.OpOverload) or not all(map(is_tracked, tensors)):
            return self._unexamined(func, args, kwargs, "it is not an op on plain tensors")
        facts = facts_of(func)
        if facts.is_view:
            results = func(*args, **kwargs)
            if _all_share(results, tensors):
                self._count_node()
                return results
        call = ShadowedCall(self, func, facts, args, kwargs, tensors)
        self.guard.save(call.written)
        results = call.run() if call.is_touched() else call.run_as_it_is()
        self.guard.note_made(results, tensors)
        return results

    def _unexamined(self, func: Any, args: Any, kwargs: Any, why: str) -> Any:
        self.leave_out(str(func), self.places.here("").module, why)
        with torch._C.DisableTorchFunction():
            results = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        self.guard.note_made(results, tensors)
        return results

    def leave_out(self, op: str, module: str, why: str) -> None:
        """Lists an op as not examined."""
        self.not_examined.setdefault((op, module), why)

    def is_wanted(self, site: Site) -> bool:
        """Whether ops of a site are measured."""
        return self._modules is None or is_inside(site.module, self._modules)

    def begin(self, kernel: str, tensors: list[torch.Tensor]) -> tuple[str, Site, int | None]:
        """Stage and site of an op that is about to be recorded, and the number of its node."""
        node = running_node()
        if node is not None and not torch.is_grad_enabled():
            return "backward", self._site_in_backward(node, kernel), None
        number = latest_node_number()
        site = self.places.here(kernel)
        is_own = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if is_own or (not torch.is_grad_enabled() and number > self._last_number):
            self._site_of[number] = site  # a custom function makes its node before its forward
        self._count_node()
        is_again = node is not None and _is_in_checkpoint()
        return ("again" if is_again else "forward"), site, number if is_own else None

    def _site_in_backward(self, node: Any, kernel: str) -> Site:
        """That of its forward; in the backward of a custom function the line that is running."""
        found = self._site_of.get(number_of(node)) or Site(op=_node_name(node))
        if not is_custom(node):
            return found
        here = self.places.here(kernel)
        return here._replace(module=found.module, module_type=found.module_type)

    def _count_node(self) -> None:
        self._last_number = latest_node_number()

    def site_of(self, number: int) -> Site:
        """The site of the op with some node of autograd."""
        return self._site_of.get(number, Site())

    def magnitude_of(self, loss: torch.Tensor) -> float:
        """How large the loss is in the reference, or the scalars that it is made of."""
        entry = self.shadows.entry(loss)
        pending = [entry.origin] if entry is not None else []
        known, largest = set(pending), abs(float(self.shadows.of(loss)))
        while pending:
            index = pending.pop()
            if not 0 <= index < len(self.seen) or math.prod(self.seen[index].shape) > 1:
                continue
            largest = max(largest, self.seen[index].magnitude)
            pending += [i for i in self.seen[index].inputs if i not in known]
            known.update(pending)
        return largest

    def record(self, seen: Seen) -> None:
        """Adds the record of an op; what a checkpoint computes again was there before."""
        if seen.stage != "again":
            self.seen.append(seen)


def _all_share(results: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether results are views, as an op's schema says that they may be."""
    addresses = {address_of(t) for t in tensors}
    return all(address_of(t) in addresses for t in tensors_in(results))


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint is running its forward again.

    Asked in a backward where gradients are recorded: that is so in a backward with a graph, too.
    Relies on ``torch.utils.checkpoint`` having one file.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _node_name(node: Any) -> str:
    return str(node.name()).removesuffix("Backward0")

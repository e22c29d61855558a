"""Observes the ops of a running program, each with its stage, its module and its source line.

``Recorder`` runs a program unchanged, and saves tensors before ops write to them. Subclasses
override ``run``: they compare each op with a shadow (``accuracy``), pass it to rules (``audit``) or
add it to a trace (``record``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from amp_fx.explanation.running import leaf_tensors
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.places import CallNotes, Places, frames_above
from amp_fx.numerics.shadow import facts_of, is_custom, is_wrapped, number_of
from amp_fx.torch_private.autograd import (
    current_autograd_node,
    latest_sequence_number,
    observing_backwards,
)
from amp_fx.torch_private.modes import DisableTorchFunction, TorchDispatchMode
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.numerics.state import StateGuard
    from amp_fx.regions.module_paths import ModulePaths


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program unchanged, guards its state, and finds the locations of its ops."""

    supports_higher_order_operators = True
    is_paused = False

    def __init__(self, guard: StateGuard, paths: ModulePaths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guard = guard
        self.notes = CallNotes()
        self.places = Places(self.notes, paths)
        self.on_backward: Callable[[torch.Tensor], None] | None = None
        """Called with each tensor with which a backward begins, before it runs."""
        self._site_of: dict[int, NodeLocation] = {}
        self._last_number = latest_sequence_number()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which ops are not observed."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager that also notes calls of functions of torch, and backwards."""
        with observing_backwards(self._begin_backward), self.notes, self:
            yield

    def _begin_backward(self, root: torch.Tensor) -> None:
        if self.on_backward is not None:
            self.on_backward(root)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = leaf_tensors((args, kwargs))
        wrapped = next(filter(is_wrapped, tensors), None)
        if wrapped is not None:
            self.see_wrapped(wrapped)
            self.guard.has_wrappers = True
            return NotImplemented  # the subclass calls ops on its inner tensors
        if self.guard.is_size_computation(tensors):
            return func(*args, **kwargs)
        self.guard.note_inputs(tensors)
        if isinstance(func, OpOverload):
            self.guard.save(facts_of(func).written(args, kwargs))
            results = self.run(func, args, kwargs, tensors)
        else:
            results = self.run_other(func, args, kwargs)
        self.guard.note_results(results, tensors)
        return results

    def run(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],  # noqa: ARG002
    ) -> Any:
        """Runs an op of the dispatcher."""
        return op(*args, **kwargs)

    def run_other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a higher-order op."""
        with DisableTorchFunction():
            return func(*args, **kwargs)

    def see_wrapped(self, tensor: torch.Tensor) -> None:
        """Called with a tensor subclass before the ops on its inner tensors run."""

    def place(
        self, kernel: str, tensors: list[torch.Tensor]
    ) -> tuple[str, NodeLocation, int | None]:
        """Returns the stage and location of a running op, and the number of its autograd node.

        The stage is ``"forward"``, ``"backward"``, or ``"again"`` in a checkpoint. In a backward,
        the location is that of the forward; in a custom function it is the running line.
        """
        node = current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            return "backward", self._site_in_backward(node, kernel), None
        number = latest_sequence_number()
        site = self.places.here(kernel)
        is_own = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        # A custom function creates its node before its forward; other ops may create none.
        if number > self._last_number and (is_own or not torch.is_grad_enabled()):
            self._site_of[number] = site
        self.count_node()
        is_again = node is not None and is_in_checkpoint()
        return ("again" if is_again else "forward"), site, number if is_own else None

    def _site_in_backward(self, node: Any, kernel: str) -> NodeLocation:
        name = str(node.name()).removesuffix("Backward0")
        found = self._site_of.get(number_of(node)) or NodeLocation(op=name)
        if not is_custom(node):
            return found
        here = self.places.here(kernel)
        return here._replace(module=found.module, module_type=found.module_type)

    def count_node(self) -> None:
        """Notes the number of the last node of autograd that is not a custom function's."""
        self._last_number = latest_sequence_number()

    def site_of(self, number: int) -> NodeLocation:
        """Returns the location of the op with a node of autograd."""
        return self._site_of.get(number, NodeLocation())


def is_in_checkpoint() -> bool:
    """Returns True if a checkpoint is running its forward again.

    A backward that records gradients may also be one with ``create_graph``. Relies on
    ``torch.utils.checkpoint`` being one file.
    """
    file = torch.utils.checkpoint.__file__
    return any(frame.f_code.co_filename == file for frame in frames_above())

"""Observes a running program: each op of the dispatcher is an event, which sinks receive.

``Recorder`` runs a program unchanged, and saves tensors before ops write to them. What is kept of
an event is the choice of its sinks: ``accuracy`` computes each op a second time, ``audit`` looks
for mistakes, and ``record`` keeps samples.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.flop_counter import flop_registry

from amp_fx.explanation.running import leaf_tensors
from amp_fx.graphs.locations import NodeLocation
from amp_fx.observe.ops import below_everything, facts_of, is_custom, is_wrapped, number_of
from amp_fx.observe.places import CallNotes, Places, frames_above
from amp_fx.observe.threads import refusing_threads
from amp_fx.torch_private.autograd import (
    current_autograd_node,
    latest_sequence_number,
    observing_backwards,
)
from amp_fx.torch_private.modes import DisableTorchFunction, TorchDispatchMode
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.observe.ops import OpFacts
    from amp_fx.observe.state import StateGuard
    from amp_fx.regions.module_paths import ModulePaths


class Place(NamedTuple):
    """The stage of an op, and its place in the program.

    Attributes:
        stage: ``"forward"``, ``"backward"``, ``"update"`` in the step of an optimizer, or
            ``"again"`` in a checkpoint.
        location: The module and the line. In a backward, those of the forward; in a custom
            function, the running line.
        number: The number of the op's node of autograd; None if it has none.
    """

    stage: str
    location: NodeLocation
    number: int | None


class Event:
    """One op of a running program. It holds tensors, so sinks keep it only for the run.

    Attributes:
        op: The overload that the dispatcher runs.
        facts: The facts in its schema.
        args: The arguments.
        kwargs: The named arguments.
        tensors: The tensors among them.
        node: The node of autograd whose backward runs the op; None outside of a backward.
        function: The name of the function of torch that the program called; empty in a backward.
        known_place: The place, if a sink has asked for it.
        result: What the op returned.
        results: The tensors in it.
        region: The autocast region around the op, if a sink follows regions.
    """

    def __init__(
        self,
        recorder: Recorder,
        op: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> None:
        self._recorder = recorder
        self.op, self.args, self.kwargs, self.tensors = op, args, kwargs, tensors
        self.facts, self.node = facts, cast("Any", current_autograd_node())
        self.known_place: Place | None = None
        self.result: Any = None
        self.region: Any = None

    @property
    def place(self) -> Place:
        """The place of the op. It takes a look at Python's stack, so it is found when asked for."""
        if self.known_place is None:
            self.known_place = self._recorder.place(self.facts.name, self.tensors)
        return self.known_place

    @property
    def stage(self) -> str:
        """The stage of the place."""
        return self.place.stage

    @property
    def location(self) -> NodeLocation:
        """The module and the line of the place."""
        return self.place.location

    @functools.cached_property
    def function(self) -> str:
        """The name of the function of torch that the program called."""
        return str(getattr(self._recorder.notes.function, "__name__", ""))

    @functools.cached_property
    def name(self) -> str:
        """The name of the op without namespace, overload and trailing underscore: ``"addmm"``."""
        name = self.facts.name.partition("::")[2]
        return name if name.endswith("__") else name.removesuffix("_")

    @functools.cached_property
    def results(self) -> list[torch.Tensor]:
        """The tensors that the op returned."""
        return leaf_tensors(self.result)

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the op writes."""
        return self.facts.written(self.args, self.kwargs)

    @functools.cached_property
    def floats(self) -> list[torch.Tensor]:
        """The floating-point inputs."""
        return [tensor for tensor in self.tensors if tensor.is_floating_point()]

    @functools.cached_property
    def flops(self) -> int:
        """The floating-point operations of a product; 0 for other ops."""
        formula = _formula(self.op)
        if formula is None or any(tensor.is_nested for tensor in self.tensors):
            return 0  # a nested tensor has no sizes that a formula can read
        kwargs = {name: value for name, value in self.kwargs.items() if name != "out"}
        return int(formula(*self.args, **kwargs, out_val=self.result))


@functools.cache
def _formula(op: OpOverload) -> Callable[..., int] | None:
    """Returns the formula of a product; that of ``addmm_`` is the one of ``addmm``."""
    packet: Any = op.overloadpacket
    if packet not in flop_registry and op._schema.name.endswith("mm_"):
        packet = getattr(torch.ops.aten, op._schema.name[6:-1], None)
    found: Callable[..., int] | None = flop_registry.get(packet)
    return found


class Sink:
    """Receives the events of a run. Its own ops are neither observed, cast nor differentiated."""

    recorder: Recorder

    def begin(self, recorder: Recorder) -> None:
        """Called with the recorder before the run."""
        self.recorder = recorder

    def before(self, event: Event) -> Any:
        """Called before an op, which may overwrite its inputs; ``after`` gets the result."""

    def after(self, event: Event, before: Any) -> None:
        """Called after an op."""

    def leave_out(self, what: str, module: str, why: str) -> None:
        """Called for what is not an event, with the reason."""

    def root(self, root: torch.Tensor) -> None:
        """Called before a backward, with the tensor that it begins with."""

    def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        """Called before and after a step of an optimizer."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program unchanged, guards its state, and passes its ops to sinks.

    Args:
        guard: The state that is put back.
        paths: The modules of the program.
        sinks: They receive the events.
    """

    supports_higher_order_operators = True
    is_paused = False

    def __init__(self, guard: StateGuard, paths: ModulePaths, *sinks: Sink) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guard, self.sinks = guard, sinks
        self.notes = CallNotes(guard.note_attributes)
        self.places = Places(self.notes, paths)
        self._location_of: dict[int, NodeLocation] = {}
        self._last_number = latest_sequence_number()
        self._is_updating = False
        for sink in sinks:
            sink.begin(self)

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
        """Context manager that also notes functions of torch, backwards and updates.

        Raises:
            UnsupportedError: A thread that the step starts computes with parameters.
        """
        handles = [
            register_optimizer_step_pre_hook(lambda each, *_: self._update(each, is_over=False)),
            register_optimizer_step_post_hook(lambda each, *_: self._update(each, is_over=True)),
        ]
        try:
            with refusing_threads(), observing_backwards(self.begin_backward), self.notes, self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def here(self) -> NodeLocation:
        """Returns the module and the line of the program that is running."""
        return self.places.here("")

    def _update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        if self.is_paused:  # a sink steps an optimizer of its own
            return
        self.guard.hold(optimizer)
        self._is_updating = not is_over
        with below_everything(), self.paused():
            for sink in self.sinks:
                sink.update(optimizer, is_over=is_over)

    def begin_backward(self, root: torch.Tensor) -> None:
        """Tells the sinks with which tensor a backward begins."""
        with below_everything(), self.paused():
            for sink in self.sinks:
                sink.root(root)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = leaf_tensors((args, kwargs))
        wrapped = next(filter(is_wrapped, tensors), None)
        if wrapped is not None:
            why = "the effect of ops on its inner tensors on the loss is unknown"
            self._leave_out(type(wrapped).__name__, why)
            self.guard.has_wrappers = True
            return NotImplemented  # the subclass calls ops on its inner tensors
        if self.guard.is_size_computation(tensors):
            return func(*args, **kwargs)
        self.guard.note_inputs(tensors)
        if isinstance(func, OpOverload):
            results = self._run(Event(self, func, facts_of(func), args, kwargs, tensors))
        else:
            self._leave_out(str(func), "it is not an op on plain tensors")
            with DisableTorchFunction():
                results = func(*args, **kwargs)
        self.guard.note_results(results, tensors)
        return results

    def _run(self, event: Event) -> Any:
        """Runs an op, and passes it to the sinks."""
        self.guard.save(event.written)
        with below_everything(), self.paused():
            given = [sink.before(event) for sink in self.sinks]
        with DisableTorchFunction():
            event.result = event.op(*event.args, **event.kwargs)
        with below_everything(), self.paused():
            for sink, before in zip(self.sinks, given, strict=True):
                sink.after(event, before)
        if event.known_place is None and torch.is_grad_enabled():
            self._count_node()
        return event.result

    def _leave_out(self, what: str, why: str) -> None:
        module = self.here().module if self.sinks else ""
        for sink in self.sinks:
            sink.leave_out(what, module, why)

    def place(self, kernel: str, tensors: list[torch.Tensor]) -> Place:
        """Returns the place of a running op, given its name and its tensors."""
        node = current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            return Place("backward", self._location_in_backward(node, kernel), None)
        number = latest_sequence_number()
        location = self.places.here(kernel)
        is_own = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        # A custom function creates its node before its forward; other ops may create none.
        if number > self._last_number and (is_own or not torch.is_grad_enabled()):
            self._location_of[number] = location
        self._count_node()
        stage = "again" if node is not None and is_in_checkpoint() else "forward"
        # A closure of an optimizer, as LBFGS calls it, is a forward and a backward.
        if node is None and self._is_updating and not torch.is_grad_enabled():
            stage = "update"
        return Place(stage, location, number if is_own else None)

    def _location_in_backward(self, node: Any, kernel: str) -> NodeLocation:
        name = str(node.name()).removesuffix("Backward0")
        found = self._location_of.get(number_of(node)) or NodeLocation(op=name)
        if not is_custom(node):
            return found
        here = self.places.here(kernel)
        return here._replace(module=found.module, module_type=found.module_type)

    def _count_node(self) -> None:
        """Notes the number of the last node of autograd that is not a custom function's."""
        self._last_number = latest_sequence_number()

    def location_of(self, number: int) -> NodeLocation:
        """Returns the location of the op with a node of autograd."""
        return self._location_of.get(number, NodeLocation())


def is_in_checkpoint() -> bool:
    """Returns True if a checkpoint is running its forward again.

    A backward that records gradients may also be one with ``create_graph``. Relies on
    ``torch.utils.checkpoint`` being one file.
    """
    file = torch.utils.checkpoint.__file__
    return any(frame.f_code.co_filename == file for frame in frames_above())

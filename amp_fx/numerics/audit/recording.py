"""Observes the ops of a training step, and counts them by dtype and module.

Every rule gets each ``Event`` once. A rule stores facts about a tensor as a mark on the tensor's
storage (``Marks``), so that views share it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.audit.report import Use
from amp_fx.observe.ops import is_tracked
from amp_fx.observe.recorder import Event, Recorder, Sink
from amp_fx.observe.state import parameters_of
from amp_fx.observe.storages import Marks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from amp_fx.numerics.audit.regions import Regions
    from amp_fx.numerics.audit.report import Finding


class Rule(Sink):
    """A group of findings that a step is examined for."""

    def forward(self, event: Event) -> None:
        """Examines an op of the forward that is no view."""

    def backward(self, event: Event) -> None:
        """Examines an op of a backward."""

    @functools.cached_property
    def found(self) -> list[Finding]:
        """The findings so far."""
        return []

    def findings(self) -> Iterable[Finding]:
        """Returns the findings at the end of the step."""
        return self.found


def is_below_float32(dtype: torch.dtype) -> bool:
    """Returns True if a floating-point dtype has fewer bits than float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


REDUCTIONS = frozenset(
    (
        "sum",
        "mean",
        "var",
        "var_mean",
        "std",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "prod",
        "cumsum",
        "cumprod",
        "_softmax",
        "_log_softmax",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_fused_rms_norm",
        "_native_batch_norm_legit",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "mse_loss",
    )
)
"""The ops that the table counts as reductions."""

KINDS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer states",
    "saved activations",
    "products",
    "reductions",
    "collectives",
)
"""What a step is counted by, in the order of the report."""

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of collectives."""

LEAF = "torch::autograd::AccumulateGrad"
"""The node of autograd that adds to the gradient of a leaf."""


class Uses:
    """Counts of tensors and ops by kind, dtype and module."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}

    def add(self, what: str, tensors: Iterable[torch.Tensor], module: str, flops: int = 0) -> None:
        """Counts one op, or one tensor."""
        sized = list(tensors)
        dtype = next((t.dtype for t in sized if t.is_floating_point()), None)
        if dtype is None:
            return
        count = self._counts.setdefault((what, dtype_name(dtype), module), [0, 0, 0])
        size = sum(tensor.numel() * tensor.itemsize for tensor in sized)
        for position, more in enumerate((1, size, flops)):
            count[position] += more

    def listed(self) -> tuple[Use, ...]:
        """Returns the counts, by kind."""
        found = [Use(*key, *count) for key, count in self._counts.items()]
        return tuple(sorted(found, key=lambda use: KINDS.index(use.what)))


class Auditor(Sink):
    """Counts the tensors and ops of a step, and passes the ops to rules.

    Args:
        regions: The regions of the step.
        rules: The rules.

    Attributes:
        uses: The counts.
        num_backwards: The number of ops of a backward.
        num_updates: The number of steps of optimizers.
    """

    def __init__(self, regions: Regions, rules: list[Rule]) -> None:
        self.uses = Uses()
        self.num_backwards = self.num_updates = 0
        self._regions, self._rules = regions, rules
        self._leaves: set[int] = set()
        self._saved: Marks[None] = Marks()

    def begin(self, recorder: Recorder) -> None:
        """Passes on the recorder."""
        super().begin(recorder)
        for sink in (self._regions, *self._rules):
            sink.begin(recorder)

    def after(self, event: Event, before: Any) -> None:
        """Counts an op and passes it to the rules, which get views only in a backward.

        Rules do not get ops on sparse, quantized and nested tensors, which have no storage of
        elements.
        """
        del before
        if event.stage == "update":
            return
        self.num_backwards += event.stage == "backward"
        if event.stage != "backward" and event.node is not None:
            return  # a checkpoint repeats the op
        device = next((t.device.type for t in event.tensors), "cpu")
        event.region = self._regions.innermost(device)
        tensors, module = event.tensors + event.results, event.location.module
        if event.flops or event.name.startswith("_scaled_dot_product"):
            self.uses.add("products", tensors, module, event.flops)
        elif event.name in REDUCTIONS:
            self.uses.add("reductions", tensors, module)
        elif event.op.namespace in COLLECTIVES and event.name != "wait_tensor":
            self.uses.add("collectives", event.tensors, module)
        if not all(map(is_tracked, tensors)) or (event.facts.is_view and event.stage != "backward"):
            return
        if event.stage == "backward":
            self._count_gradient(event)
        for rule in self._rules:
            examine = rule.backward if event.stage == "backward" else rule.forward
            examine(event)

    def _count_gradient(self, event: Event) -> None:
        """Counts the gradient that an op writes to a leaf."""
        if event.floats and event.node.name() == LEAF:
            variable = event.node.variable
            if id(variable) not in self._leaves:
                self._leaves.add(id(variable))
                module = self.recorder.places.module_of(variable)
                self.uses.add("gradients", event.floats[:1], module)

    def root(self, root: torch.Tensor) -> None:
        """Passes on what a backward begins with."""
        for rule in self._rules:
            rule.root(root)

    def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        """Passes on the steps of optimizers, and counts their states."""
        self.num_updates += is_over
        for parameter in parameters_of(optimizer) if is_over else ():
            module = self.recorder.places.module_of(parameter)
            for tensor in leaf_tensors(dict(optimizer.state.get(parameter, {}))):
                if tensor.numel() > 1:
                    self.uses.add("optimizer states", [tensor], module)
        for rule in self._rules:
            rule.update(optimizer, is_over=is_over)

    def count_members(self, modules: list[torch.nn.Module]) -> None:
        """Counts the parameters and buffers of modules."""
        parameters = (tensor for module in modules for tensor in module.parameters())
        buffers = (tensor for module in modules for tensor in module.buffers())
        for what, tensors in (("parameters", parameters), ("buffers", buffers)):
            for tensor in dict.fromkeys(tensors):
                self.uses.add(what, [tensor], self.recorder.places.module_of(tensor))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves for the backward."""
        recorder = self.recorder
        if recorder.is_paused or not is_tracked(tensor):
            return tensor
        if not self._saved.has(tensor) and recorder.guard.is_allocated(tensor):
            self._saved.put(tensor, None)
            self.uses.add("saved activations", [tensor], recorder.here().module)
        return tensor

"""Observes the ops of a training step, and counts them by dtype and module.

Each op becomes an ``Event``, which every rule gets once. A rule stores facts about a tensor as a
mark on the tensor's storage (``Marks``), so that views share it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.audit.regions import Regions
from amp_fx.numerics.audit.report import Use
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.shadow import facts_of, is_wrapped
from amp_fx.numerics.storages import Marks
from amp_fx.torch_private.autograd import current_autograd_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.numerics.audit.regions import Region
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.numerics.state import StateGuard
    from amp_fx.regions.module_paths import ModulePaths
    from amp_fx.torch_private.ops import OpOverload


@dataclasses.dataclass(frozen=True)
class Event:
    """One op of the step.

    Attributes:
        op: The overload that the dispatcher ran.
        name: The name of the op without namespace, overload and trailing underscore: ``"addmm"``.
        function: The name of the function of torch that the program called; empty in a backward.
        stage: ``"forward"`` or ``"backward"``; the step of an optimizer is not examined op by op.
        args: The arguments.
        tensors: The tensors among them.
        results: The tensors that the op returned.
        site: The module and the line; of the backward of an op, those of the op.
        node: The node of autograd that is running; None outside of a backward.
        region: The innermost autocast region of the device type; None outside of regions.
        flops: The floating-point operations, if the op is a product.
        before: The value before of a low tensor that a backward adds to; else None.
    """

    op: OpOverload
    name: str
    function: str
    stage: str
    args: tuple[Any, ...]
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]
    site: NodeLocation
    node: Any
    region: Region | None
    flops: int
    before: torch.Tensor | None

    @property
    def floats(self) -> list[torch.Tensor]:
        """The floating-point inputs."""
        return [tensor for tensor in self.tensors if tensor.is_floating_point()]


class Rule:
    """A group of findings that a step is examined for."""

    @functools.cached_property
    def found(self) -> list[Finding]:
        """The findings so far."""
        return []

    def see(self, event: Event) -> None:
        """Examines one op after it ran."""

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


class AuditMode(Recorder):  # type: ignore[no-untyped-call]
    """Runs a step unchanged, and passes each op to rules."""

    def __init__(self, guard: StateGuard, paths: ModulePaths) -> None:
        super().__init__(guard, paths)
        self.regions = Regions(self.here)
        self.uses = Uses()
        self.rules: list[Rule] = []
        self.is_updating = False
        self.num_backwards = 0
        """The number of ops of a backward."""
        self._saved: Marks[None] = Marks()

    def run(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Runs an op, and describes it to the rules."""
        is_sum = op is torch.ops.aten.add_.Tensor and is_below_float32(tensors[0].dtype)
        node = current_autograd_node()
        before = tensors[0].detach().clone() if is_sum and node is not None else None
        results = op(*args, **kwargs)
        # A closure of an optimizer, as LBFGS calls it, is a forward and a backward.
        if self.is_updating and not torch.is_grad_enabled() and node is None:
            return results
        stage, site, _ = self.place("", tensors)
        self.num_backwards += stage == "backward"
        if stage != "backward" and node is not None:
            return results  # a checkpoint repeats the op
        name = op._schema.name.partition("::")[2]
        device = next((t.device.type for t in tensors), "cpu")
        event = Event(
            op=op,
            name=name if name.endswith("__") else name.removesuffix("_"),
            function=str(getattr(self.notes.function, "__name__", "")),
            stage=stage,
            args=args,
            tensors=tensors,
            results=leaf_tensors(results),
            site=site,
            node=node,
            region=self.regions.innermost(device),
            flops=_flops(op, args, kwargs, results),
            before=before,
        )
        self._pass_on(event, is_view=facts_of(op).is_view)
        return results

    def _pass_on(self, event: Event, *, is_view: bool) -> None:
        """Counts an op and passes it to the rules, which get views only in a backward.

        Rules do not get ops on sparse and quantized tensors, which have no storage of elements.
        """
        tensors, module = event.tensors + event.results, event.site.module
        if event.flops or event.name.startswith("_scaled_dot_product"):
            self.uses.add("products", tensors, module, event.flops)
        elif event.name in REDUCTIONS:
            self.uses.add("reductions", tensors, module)
        elif event.op.namespace in COLLECTIVES and event.name != "wait_tensor":
            self.uses.add("collectives", event.tensors, module)
        is_plain = all(t.layout is torch.strided and not t.is_quantized for t in tensors)
        if not is_plain or (is_view and event.stage != "backward"):
            return
        with self.paused():
            for rule in self.rules:
                rule.see(event)

    def here(self) -> NodeLocation:
        """Returns the module and the line of the program that is running."""
        return self.places.here("")

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves for the backward."""
        if self.is_paused or tensor.layout is not torch.strided or is_wrapped(tensor):
            return tensor
        if not self._saved.has(tensor) and self.guard.is_allocated(tensor):
            self._saved.put(tensor, None)
            self.uses.add("saved activations", [tensor], self.here().module)
        return tensor


def _flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> int:
    """Returns the floating-point operations of a product; 0 for other ops."""
    formula = _formula(op)
    if formula is None:
        return 0
    return int(formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=results))


@functools.cache
def _formula(op: OpOverload) -> Callable[..., int] | None:
    """Returns the formula of a product; that of ``addmm_`` is the one of ``addmm``."""
    packet: Any = op.overloadpacket
    if packet not in flop_registry and op._schema.name.endswith("mm_"):
        packet = getattr(torch.ops.aten, op._schema.name[6:-1], None)
    found: Callable[..., int] | None = flop_registry.get(packet)
    return found

"""Observes the ops of a training step, and counts them by dtype and module.

Each op becomes an ``Event``, which every rule sees once. A rule remembers what it knows about a
tensor as a mark on the tensor's storage, so that views share it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils.flop_counter import flop_registry

from amp_fx.dtypes import dtype_name
from amp_fx.numerics.audit.regions import Regions
from amp_fx.numerics.audit.report import Use
from amp_fx.numerics.pausable import PausableMode
from amp_fx.numerics.places import CallNotes, Places, Site
from amp_fx.numerics.shadow import (
    StorageReference,
    address_of,
    facts_of,
    is_wrapped,
    latest_node_number,
    number_of,
    running_node,
    tensors_in,
)
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.modes import DisableTorchFunction
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amp_fx.numerics.audit.regions import Region
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.numerics.state import StateGuard

T = TypeVar("T")


class Marks(Generic[T]):
    """A dictionary whose keys are storages, and which keeps none of them alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageReference, T]] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor's storage has a mark."""
        return address_of(tensor) in self._entries

    def get(self, tensor: torch.Tensor, default: T | None = None) -> T | None:
        """Returns the mark of a tensor's storage, or a default."""
        found = self._entries.get(address_of(tensor))
        return default if found is None else found[1]

    def put(self, tensor: torch.Tensor, mark: T) -> None:
        """Sets the mark of a tensor's storage."""
        if len(self._entries) % 512 == 511:
            for address in [a for a, (alive, _) in self._entries.items() if alive.is_dead()]:
                del self._entries[address]
        reference = StorageReference(tensor.untyped_storage())
        self._entries[address_of(tensor)] = (reference, mark)

    def pop(self, tensor: torch.Tensor) -> None:
        """Removes the mark of a tensor's storage."""
        self._entries.pop(address_of(tensor), None)


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
    site: Site
    node: Any
    region: Region | None
    flops: int
    before: torch.Tensor | None

    @property
    def floats(self) -> list[torch.Tensor]:
        """The floating-point inputs."""
        return [tensor for tensor in self.tensors if tensor.is_floating_point()]


class Names:
    """Paths of parameters and buffers, as the sites of ops have them.

    Args:
        places: Knows the modules that were called, and the variables that hold them.
        modules: Other modules that the step knows.
    """

    def __init__(self, places: Places, modules: list[torch.nn.Module]) -> None:
        self._places, self._modules = places, modules
        self._paths: dict[int, str] = {}
        self._num_roots = -1

    def of(self, tensor: torch.Tensor) -> str:
        """Returns the path of a parameter or buffer."""
        if self._num_roots != len(self._places.roots):
            self._num_roots = len(self._places.roots)
            roots = [*self._places.roots.values(), *(("", module) for module in self._modules)]
            self._paths.clear()
            for prefix, root in roots:
                for name, value in (*root.named_parameters(), *root.named_buffers()):
                    path = f"{prefix}.{name}".strip(".").replace("_orig_mod.", "")
                    self._paths.setdefault(id(value), path)
        return self._paths.get(id(tensor), "a leaf tensor")

    def module_of(self, tensor: torch.Tensor) -> str:
        """Returns the path of the module of a parameter or buffer."""
        return self.of(tensor).rpartition(".")[0]


class Rule:
    """A group of findings that a step is examined for."""

    def see(self, event: Event) -> None:
        """Examines one op after it ran."""

    def findings(self) -> Iterator[Finding]:
        """Yields the findings at the end of the step."""
        yield from ()


def is_below_float32(dtype: torch.dtype) -> bool:
    """Returns True if a floating-point dtype has fewer bits than float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


REDUCTIONS = frozenset(
    (
        *("sum", "mean", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm"),
        *("logsumexp", "prod", "cumsum", "cumprod", "_softmax", "_log_softmax"),
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"),
        *("_native_batch_norm_legit", "nll_loss_forward", "nll_loss2d_forward", "mse_loss"),
    )
)
"""The ops that the table counts as reductions."""

KINDS = (
    *("parameters", "buffers", "gradients", "optimizer states", "saved activations"),
    *("products", "reductions", "collectives"),
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


class AuditMode(PausableMode):
    """Runs a step as it is, and shows each op to rules."""

    supports_higher_order_operators = True

    def __init__(self, guard: StateGuard, modules: list[torch.nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guard = guard
        self.notes = CallNotes()
        self.places = Places(self.notes)
        self.names = Names(self.places, modules)
        self.regions = Regions(self.here)
        self.uses = Uses()
        self.rules: list[Rule] = []
        self.is_updating = False
        self.num_backwards = 0
        """The number of ops of a backward."""
        self._site: tuple[int, Site] = (-1, Site())
        self._site_of: dict[int, Site] = {}
        self._saved: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(map(is_wrapped, tensors)):
            self.guard.has_wrappers = True
            return NotImplemented  # it calls ops on the tensors that it consists of
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # as a DTensor finds the layout of a result
        self.guard.look_at(tensors)
        if not isinstance(func, OpOverload):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        facts = facts_of(func)
        if not facts.is_view:
            self.guard.save(facts.written(args, kwargs))
        is_sum = facts.name == "aten::add_" and is_below_float32(tensors[0].dtype)
        before = tensors[0].detach().clone() if is_sum and running_node() is not None else None
        results = func(*args, **kwargs)
        if not facts.is_view:
            self.guard.note_made(results, tensors)
        # A closure of an optimizer, as LBFGS calls it, is a forward and a backward.
        is_update = self.is_updating and not torch.is_grad_enabled() and running_node() is None
        if not is_update:
            event = self._event(func, args, kwargs, tensors, results, before)
            if event is not None:
                self._tell(event, is_view=facts.is_view)
        return results

    def _event(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        results: Any,
        before: torch.Tensor | None,
    ) -> Event | None:
        """Describes an op that has just run; None if a checkpoint repeats it."""
        stage, site, node = self._place(tensors)
        if stage == "again":
            return None
        name = func._schema.name.partition("::")[2]
        device = next((t.device.type for t in tensors), "cpu")
        return Event(
            op=func,
            name=name if name.endswith("__") else name.removesuffix("_"),
            function=str(getattr(self.notes.function, "__name__", "")),
            stage=stage,
            args=args,
            tensors=tensors,
            results=tensors_in(results),
            site=site,
            node=node,
            region=self.regions.innermost(device),
            flops=_flops(func, args, kwargs, results),
            before=before,
        )

    def _tell(self, event: Event, *, is_view: bool) -> None:
        """Counts an op and shows it to the rules, which see views only in a backward.

        Sparse and quantized tensors have no storage of elements: rules do not see their ops.
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

    def _place(self, tensors: list[torch.Tensor]) -> tuple[str, Site, Any]:
        """Returns the stage, the site and the running node of the op that has just run."""
        node = running_node()
        if node is not None and not torch.is_grad_enabled():
            self.num_backwards += 1
            site = self._site_of.get(number_of(node))
            return "backward", site or Site(), node
        site = self.here()
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self._site_of[latest_node_number()] = site
        return "forward" if node is None else "again", site, node

    def here(self) -> Site:
        """Returns the module and the line of the program that is running."""
        number = self.notes.number
        if self.notes.function is None or self._site[0] != number:
            self._site = (number, self.places.here(""))
        return self._site[1]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves for the backward."""
        if not self.is_paused and tensor.layout is torch.strided and not is_wrapped(tensor):
            address = address_of(tensor)
            if address not in self._saved and address in self.guard._made:
                self._saved.add(address)
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

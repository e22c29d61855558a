"""Restores the user's state after a run: tensors, gradients, attributes and random numbers.

The guard knows nothing about the program. Before an op writes to a storage that the run did not
allocate, the guard copies the storage.
"""

from __future__ import annotations

import contextlib
import sysconfig
from collections import OrderedDict, defaultdict
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.graphs.locations import is_library
from amp_fx.observe.ops import below_everything, inner_tensors, is_wrapped
from amp_fx.observe.storages import Marks, address_of
from amp_fx.random_states import random_states
from amp_fx.regions.variables import variables_of
from amp_fx.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class StateGuard:
    """State of the user that a run may change.

    Args:
        owners: Objects whose attributes are restored.
    """

    def __init__(self, owners: Iterable[Any] = ()) -> None:
        self.has_wrappers = self.has_meta_tensors = False
        self._dtypes: set[torch.dtype] = set()
        self._parameter_dtypes: set[torch.dtype] = set()
        self._attributes: dict[int, SavedAttributes] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._allocated: Marks[None] = Marks()
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for owner in owners:
            self.hold(owner)

    def hold(self, owner: Any) -> None:
        """Saves the attributes of an object, unless they are saved already."""
        if id(owner) not in self._attributes:
            self._attributes[id(owner)] = SavedAttributes(owner)

    def is_size_computation(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True if an op computes sizes for the program, on ``meta``.

        Tensor subclasses and the formulas of forward-mode gradients do so.
        """
        are_meta = [t.is_meta or isinstance(t, FakeTensor) for t in tensors]
        return any(are_meta) and (self.has_wrappers or (self.has_meta_tensors and all(are_meta)))

    def note_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the dtypes of an op's inputs, and the gradients of leaves among them."""
        for tensor in tensors:
            check_has_data(tensor)
            if tensor.is_floating_point():
                self._dtypes.add(tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    self._parameter_dtypes.add(tensor.dtype)
            if tensor.requires_grad and _is_leaf(tensor):
                self._leaves.setdefault(id(tensor), (tensor, tensor.grad))

    def note_attributes(self, tensor: torch.Tensor) -> None:
        """Notes the gradient and the memory of a tensor, before the program replaces them."""
        if _is_leaf(tensor):
            self._leaves.setdefault(id(tensor), (tensor, tensor.grad))
        if _has_plain_memory(tensor):
            self._memory.setdefault(id(tensor), (tensor, tensor.data))

    def check_float32(self) -> None:
        """Raises an error if the program has no float32 tensor."""
        found = self._parameter_dtypes or self._dtypes
        if not found:
            raise UnsupportedError(
                "no op of the program takes a floating-point tensor: nothing can lose accuracy"
            )
        if torch.float32 in found:
            return
        names = " and ".join(sorted(dtype_name(dtype) for dtype in found))
        what = "model" if self._parameter_dtypes else "program"
        raise UnsupportedError(
            f"the {what} is in {names}: amp_fx can only examine what autocast does to "
            f"float32 {what}s" + ("; call .float() on it" if self._parameter_dtypes else "")
        )

    def note_results(self, results: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the storages that an op allocated, given its inputs."""
        given = {address_of(t) for t in tensors if t.layout is torch.strided}
        for result in leaf_tensors(results):
            if result.is_meta:
                self.has_meta_tensors = True
                continue
            is_plain = result.layout is torch.strided and not is_wrapped(result)
            if is_plain and not self.is_allocated(result) and address_of(result) not in given:
                self._allocated.put(result, None)

    def is_allocated(self, tensor: torch.Tensor) -> bool:
        """Returns True if the run allocated the storage of a tensor."""
        return self._allocated.has(tensor)

    def save(self, written: Iterable[torch.Tensor]) -> None:
        """Copies the user's tensors before an op writes to them."""
        for tensor in written:
            if is_wrapped(tensor):  # it has no memory itself
                self.save(inner_tensors(tensor))
                continue
            if tensor.layout is not torch.strided or self.is_allocated(tensor):
                continue
            storage, address = tensor.untyped_storage(), address_of(tensor)
            base = tensor._base if tensor._base is not None else tensor
            if base.grad_fn is None:
                self._bases[id(base)] = base
            if address in self._storages:
                continue
            with torch.inference_mode(False), below_everything():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self._storages[address] = (whole, whole.clone())

    def restore(self) -> None:
        """Restores the state."""
        with torch.no_grad(), below_everything():
            for whole, before in self._storages.values():
                if whole.untyped_storage().nbytes() >= before.nbytes:
                    whole.copy_(before)  # else the program has freed it, as FSDP2 does
            for base in self._bases.values():
                if base.grad_fn is not None:
                    base.detach_()
        for saved in self._attributes.values():
            saved.restore()
        _restore_memory(self._memory.values())
        for leaf, gradient in self.leaves():
            if leaf.grad is not gradient:
                leaf.grad = gradient
        self._bases.clear()
        self._storages.clear()

    def leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Returns the leaves that ops read, and the gradients that these had before."""
        return list(self._leaves.values())


class SavedAttributes:
    """The attributes of an object, with the contents of dictionaries and lists among them.

    Tensors among these keep their memory, which programs can exchange (``weight.data = ...``).
    """

    def __init__(self, owner: Any) -> None:
        self._owner, self._class = owner, type(owner)
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        pending: list[Any] = [vars(owner)]
        while pending:
            container = pending.pop()
            if id(container) not in self._contents:
                members = _members(container)
                self._contents[id(container)] = container, container.copy()
                self._memory += [(v, v.data) for v in members if _has_plain_memory(v)]
                pending += [v for v in members if type(v) in _CONTAINERS]

    def restore(self) -> None:
        """Restores changed containers in place."""
        if type(self._owner) is not self._class:
            return  # a lazy module has created its parameters
        for container, before in self._contents.values():
            if [*map(id, _members(container))] != [*map(id, _members(before))]:
                container.clear()
                fill = container.update if isinstance(container, dict) else container.extend
                fill(before)
        _restore_memory(self._memory)


def _restore_memory(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Gives tensors the memory back that they had."""
    for tensor, before in pairs:
        if _where(tensor) != _where(before):
            tensor.data = before


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Returns True if autograd stores the gradient of a tensor.

    A view that was created without gradients also has no node, until its base is written in place.
    """
    return tensor.is_leaf and (tensor._base is None or not tensor._base.requires_grad)


def _has_plain_memory(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_lazy(value):
        return False
    return value.layout is torch.strided and not is_wrapped(value)


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors share if they are the same elements in memory."""
    layout = tensor.dtype, tensor.shape, tensor.stride()
    return (tensor.device, tensor.data_ptr(), *layout)


_CONTAINERS = (dict, OrderedDict, defaultdict, list)


def _members(container: Any) -> list[Any]:
    is_dict = isinstance(container, dict)
    return [*container, *container.values()] if is_dict else container


def parameters_of(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


@contextlib.contextmanager
def undisturbed(guard: StateGuard, *, is_eager: bool = True) -> Iterator[Callable[[], None]]:
    """Context manager that restores the state and the random numbers at the end.

    Yields a function that restores the random numbers at once. With ``is_eager``, compiled code
    runs eagerly, so that each op is observed and Dynamo compiles nothing.
    """
    rewind = random_states("cuda", "xpu")
    try:
        with torch.compiler.set_stance("force_eager" if is_eager else "default"):
            yield rewind
    finally:
        guard.restore()
        rewind()


def modules_of(step: Any) -> list[torch.nn.Module]:
    """Returns the modules of a step: itself, or those of its variables and of its object."""
    return list(dict.fromkeys(v for v in known_to(step) if isinstance(v, torch.nn.Module)))


def leaves_of(step: Any) -> list[torch.Tensor]:
    """Returns the leaf tensors among a step's variables, without those of modules."""
    return [v for v in known_to(step) if isinstance(v, torch.Tensor) and v.is_leaf]


_HELD = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
"""Classes whose objects are restored, besides modules."""


def guard_of(step: Any, *others: Any) -> StateGuard:
    """Returns a guard for the modules, optimizers, scalers and schedulers of a step.

    The latter are found among the variables of the step and the attributes of its modules.

    Args:
        step: The step.
        others: Other objects whose attributes are restored.
    """
    modules = [module for root in modules_of(step) for module in root.modules()]
    attributes = [value for module in modules for value in vars(module).values()]
    held = [value for value in (*known_to(step), *attributes) if isinstance(value, _HELD)]
    return StateGuard([*modules, *held, *others])


def known_to(step: Any) -> list[Any]:
    """Returns the values of a step's variables, and of lists and objects among these.

    A function of the user's code among the values, which the step may call, adds its own variables.
    """
    found: dict[int, Any] = {}
    pending = [step]
    while pending:
        for _, value in variables_of(pending.pop()):
            if id(value) not in found:
                found[id(value)] = value
                if isinstance(value, (FunctionType, MethodType)) and not _is_installed(value):
                    pending.append(value)
    return [*found.values()]


def _is_installed(function: Any) -> bool:
    """Returns True for a function of a library, whose variables are not the user's."""
    code = getattr(function, "__code__", None)  # a method may be bound to any callable
    file = "" if code is None else code.co_filename
    return not file or is_library(file) or file.startswith(_INSTALLED)


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def check_has_data(tensor: torch.Tensor) -> None:
    """Raises an error for a tensor without data: fake, or on ``meta``."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        kind = "fake" if isinstance(tensor, FakeTensor) else "on the meta device"
        raise UnsupportedError(
            f"the program is run, and a tensor of sizes {tuple(tensor.shape)} is {kind}: it has "
            "no numbers; amp_fx.explain works without any"
        )

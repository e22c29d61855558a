"""Keeps what is the user's as it was: buffers, gradients, random numbers.

Nothing has to be known of the program: the first write to a storage that the run has not made
itself is noticed, and what was there before is kept aside.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import AccuracyError
from amp_fx.numerics.shadow import below_everything, is_wrapped, tensors_in
from amp_fx.numerics.storages import Marks, address_of
from amp_fx.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


class StateGuard:
    """The state that a run may write to, as it was before."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self.has_wrappers = self.has_sizes = False
        self._dtypes: set[torch.dtype] = set()
        self._parameter_dtypes: set[torch.dtype] = set()
        self._others: list[_Attributes | _OptimizerState] = [
            *(_Attributes(m) for root in modules for m in root.modules()),
            *map(_OptimizerState, optimizers),
        ]
        self._histories: dict[int, torch.Tensor] = {}
        self._made: Marks[None] = Marks()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the state of an optimizer that was not known before its step."""
        known = (each for each in self._others if isinstance(each, _OptimizerState))
        if not any(each.optimizer is optimizer for each in known):
            self._others.append(_OptimizerState(optimizer))

    def is_aside(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True if an op is on what the program itself keeps sizes in, on ``meta``.

        Tensors that stand for others do, and formulas of forward gradients, by themselves.
        """
        are_meta = [t.is_meta or isinstance(t, FakeTensor) for t in tensors]
        return any(are_meta) and (self.has_wrappers or (self.has_sizes and all(are_meta)))

    def look_at(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes down the tensors that an op is called with."""
        for tensor in tensors:
            refuse_strange(tensor)
            if tensor.is_floating_point():
                self._dtypes.add(tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    self._parameter_dtypes.add(tensor.dtype)
            if not tensor.requires_grad or not tensor.is_leaf or id(tensor) in self._leaves:
                continue
            self._leaves[id(tensor)] = (tensor, tensor.grad)

    def refuse_other_dtypes(self) -> None:
        """Refuses a program of which nothing is in float32."""
        found = self._parameter_dtypes or self._dtypes
        if not found:
            raise AccuracyError(
                "no op of the program takes a floating-point tensor: nothing can lose accuracy"
            )
        if torch.float32 in found:
            return
        names = " and ".join(sorted(dtype_name(dtype) for dtype in found))
        what = "model" if self._parameter_dtypes else "program"
        raise AccuracyError(
            f"the {what} is in {names}: amp_fx can only examine what autocast does to "
            f"float32 {what}s" + ("; call .float() on it" if self._parameter_dtypes else "")
        )

    def note_made(self, results: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Takes down what an op has made, of the tensors that it was called with."""
        given = {address_of(t) for t in tensors if t.layout is torch.strided}
        for result in tensors_in(results):
            if result.is_meta:
                self.has_sizes = True
                continue
            is_plain = result.layout is torch.strided and not is_wrapped(result)
            if is_plain and not self._made.has(result) and address_of(result) not in given:
                self._made.put(result, None)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Returns True if the run has made a tensor's storage itself."""
        return self._made.has(tensor)

    def save(self, written: Iterable[torch.Tensor]) -> None:
        """Keeps what is about to be written to, if it is the user's."""
        for tensor in written:
            if tensor.layout is not torch.strided or self.is_made(tensor):
                continue
            storage, address = tensor.untyped_storage(), address_of(tensor)
            base = tensor._base if tensor._base is not None else tensor
            if base.grad_fn is None:
                self._histories[id(base)] = base
            if address in self._kept:
                continue
            with torch.inference_mode(False), below_everything():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self._kept[address] = (whole, whole.clone())

    def save_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps tensors that compiled code may write to, unseen, and their gradients."""
        several = list(tensors)
        self.look_at(several)
        self.save(several)

    def restore(self) -> None:
        """Puts back what was written to."""
        with torch.no_grad(), below_everything():
            for whole, before in self._kept.values():
                if whole.untyped_storage().nbytes() >= before.nbytes:
                    whole.copy_(before)  # else the program has freed it, as FSDP2 does
            for base in self._histories.values():
                if base.grad_fn is not None:
                    base.detach_()
        for other in self._others:
            other.restore()
        self._histories.clear()
        for leaf, gradient in self._leaves.values():
            if leaf.grad is not gradient:
                leaf.grad = gradient
        self._kept.clear()

    def leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The leaves that were met, and the gradients that they had."""
        return list(self._leaves.values())


class _Attributes:
    """The objects that the attributes of a module are bound to."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._class = module, type(module)
        self._plain = dict(vars(module))
        self._tables = {n: dict(v) for n, v in self._plain.items() if n in _TABLES}

    def restore(self) -> None:
        if type(self._module) is not self._class:
            return  # a lazy module has made its parameters
        found = vars(self._module)
        for name in [name for name in found if name not in self._plain]:
            del found[name]
        found.update(self._plain)
        for name, table in self._tables.items():
            if not _is_same(found[name], table):
                found[name].clear()
                found[name].update(table)


class _OptimizerState:
    """The state of an optimizer without tensors, and its options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._states = {p: dict(state) for p, state in optimizer.state.items()}
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        states = self.optimizer.state
        for parameter in [p for p in states if p not in self._states]:
            del states[parameter]
        for parameter, before in self._states.items():
            states[parameter].clear()
            states[parameter].update(before)
        self.optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, before in self._groups:
            group.clear()
            group.update(before)


_TABLES = ("_parameters", "_buffers", "_modules")


def _is_same(found: dict[str, Any], table: dict[str, Any]) -> bool:
    return found.keys() == table.keys() and all(found[name] is table[name] for name in table)


def modules_of(step: Any) -> list[torch.nn.Module]:
    """The modules that a step is or knows: those of its variables, its closure and its object."""
    return list(dict.fromkeys(v for v in known_to(step) if isinstance(v, torch.nn.Module)))


def leaves_of(step: Any) -> list[torch.Tensor]:
    """The tensors that a step knows by itself, outside of modules."""
    return [v for v in known_to(step) if isinstance(v, torch.Tensor) and v.is_leaf]


def guard_of(step: Any, *others: torch.optim.Optimizer) -> StateGuard:
    """Returns a guard that restores modules, optimizers and tensors after a step."""
    optimizers = [v for v in known_to(step) if isinstance(v, torch.optim.Optimizer)]
    optimizers += others
    return StateGuard(modules_of(step), dict.fromkeys(optimizers))


def known_to(step: Any) -> list[Any]:
    """Returns the values of a step's variables, and of lists and objects among these."""
    owner = getattr(step, "__self__", None)
    function = inspect.unwrap(step) if callable(step) else step
    found: list[Any] = [step, owner, *(getattr(function, "__defaults__", None) or ())]
    if owner is not None and not isinstance(owner, torch.nn.Module):
        found += getattr(owner, "__dict__", {}).values()
    found += (getattr(function, "__kwdefaults__", None) or {}).values()
    if isinstance(step, functools.partial):
        found += [step.func, *step.args, *step.keywords.values()]
    code = getattr(function, "__code__", None)
    if code is not None:
        known = getattr(function, "__globals__", {})
        found += [known[name] for name in code.co_names if name in known]
        found += [c.cell_contents for c in function.__closure__ or () if has_content(c)]
    for value in list(found):
        if isinstance(value, (list, tuple)):
            found += value
        elif type(value) is dict:
            found += value.values()
    return found


def has_content(cell: Any) -> bool:
    """Returns True if a variable of an enclosing function has a value."""
    try:
        cell.cell_contents  # noqa: B018 - empty cells raise
    except ValueError:
        return False
    return True


def refuse_strange(tensor: torch.Tensor) -> None:
    """Refuses what has no numbers."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        kind = "fake" if isinstance(tensor, FakeTensor) else "on the meta device"
        raise AccuracyError(
            f"the program is run, and a tensor of sizes {tuple(tensor.shape)} is {kind}: it has "
            "no numbers; amp_fx.explain works without any"
        )

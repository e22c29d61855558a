"""How eager code reads weights: seen below autocast, whatever Python wrote the reading.

A graph shows what Dynamo captured. Uncompiled, a program may do something else: kernels that
take a whole layer, branches for ``torch.compiler.is_compiling()``, code that Dynamo never sees.
So the program is run on a stand-in too, and every op that takes a weight is looked at.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.graphs.casts import is_widening
from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.passes.low_reads import LOW_DTYPES
from amp_fx.policies.calls import CAST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class SeenCall:
    """One call of an op; equal to another that does the same.

    Attributes:
        text: The op and its arguments, weights by name and other tensors by dtype.
        weights: The weights that it takes, through casts too.
    """

    text: str
    weights: frozenset[str] = dataclasses.field(compare=False)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what takes weights, and every other call.

    Weights that share memory go under one of their names.

    Attributes:
        dtypes: What a weight is cast to by those that read it through a cast.
        others: An op that reads a weight otherwise, or writes it, for each that has one.
        calls: All calls but casts of float32 weights, and casts there and back that change no
            bit: equal for a program that does the same with weights of another dtype.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.others: dict[str, str] = {}
        self.calls: list[SeenCall] = []
        self._names = {storage_id(tensor): name for name, tensor in weights.items()}
        self._casts: dict[int, str] = {}
        self._widened: dict[int, torch.dtype] = {}
        self._held: list[torch.Tensor] = []  # a freed storage's number comes again

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        read = [t for t in _plain_tensors(args, kwargs) if storage_id(t) in self._names]
        is_cast = bool(read) and _is_low_cast(func, read[0], kwargs)
        if not (is_cast or _asks_form(func) or self._keeps_bits(func, args, kwargs)):
            self.calls.append(self._seen(func, args, kwargs))
        result = func(*args, **kwargs)
        if is_cast:
            self._note_cast(self._names[storage_id(read[0])], result)
        elif _is_plain_cast(func, kwargs) and is_widening(args[0].dtype, result.dtype):
            self._widened[storage_id(result)] = args[0].dtype
            self._held.append(result)
        elif not (_is_view(func, read, result) or _asks_form(func)):
            for tensor in read:
                self.others.setdefault(self._names[storage_id(tensor)], str(func))
        return result

    def reason(self, name: str, dtype: torch.dtype) -> str:
        """Why a weight may not be stored in a dtype, as far as this run tells; or ``""``."""
        if name in self.others:
            return f"read as it is: {self.others[name].removesuffix('.default')}"
        found = self.dtypes.get(name, set())
        others = ", ".join(sorted(str(d).removeprefix("torch.") for d in found - {dtype}))
        if others:
            return f"read in {others}"
        return "" if found else "nothing reads it in this call"

    def hand_out(self, outputs: Any) -> None:
        """Notes the weights among what the program gives."""
        for tensor in _plain_tensors(pytree.tree_leaves(outputs)):
            if storage_id(tensor) in self._names:
                self.others[self._names[storage_id(tensor)]] = "the model's output"

    def _keeps_bits(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call widens a tensor, or takes a widened one back; writes end that."""
        tensors = _plain_tensors(args, kwargs)
        if not _is_plain_cast(func, kwargs) or not tensors:
            if getattr(getattr(func, "_schema", None), "is_mutable", True):
                for tensor in tensors:
                    self._widened.pop(storage_id(tensor), None)
            return False
        source, dtype = tensors[0], kwargs["dtype"]
        return is_widening(source.dtype, dtype) or self._widened.get(storage_id(source)) == dtype

    def _note_cast(self, name: str, result: torch.Tensor) -> None:
        self.dtypes.setdefault(name, set()).add(result.dtype)
        self._casts[storage_id(result)] = name
        self._held.append(result)

    def _seen(self, func: Any, args: Any, kwargs: Any) -> SeenCall:
        leaves = pytree.tree_leaves((args, kwargs))
        named = [(leaf, self._weight(leaf)) for leaf in leaves]
        texts = [
            f"{name or leaf.dtype}{tuple(leaf.shape)}"
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf, name in named
        ]
        return SeenCall(f"{func} {' '.join(texts)}", frozenset(name for _, name in named if name))

    def _weight(self, leaf: Any) -> str:
        """The weight that a tensor is, or a view or a cast of; ``""`` for none."""
        if not isinstance(leaf, torch.Tensor) or not _has_storage(leaf):
            return ""
        number = storage_id(leaf)
        return self._names.get(number) or self._casts.get(number, "")


class Questions(TorchFunctionMode):
    """Notes the weights whose dtype the program's Python looks at."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.asked: set[str] = set()
        self._names = {id(tensor): name for name, tensor in weights.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _QUESTIONS:
            self.asked.update(self._names[id(a)] for a in args if id(a) in self._names)
        return func(*args, **(kwargs or {}))


_QUESTIONS = (
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.element_size,
    torch.Tensor.float,
)


def _plain_tensors(*values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(*values) if _has_storage(tensor)]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    )


def _is_low_cast(func: Any, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call rounds a float32 weight, and does nothing else to it."""
    is_cast = _is_plain_cast(func, kwargs) and tensor.dtype == torch.float32
    return is_cast and kwargs["dtype"] in LOW_DTYPES


def _is_plain_cast(func: Any, kwargs: Mapping[str, Any]) -> bool:
    given = {name for name, value in kwargs.items() if value is not None}
    return func is CAST and given == {"dtype"}


def _is_view(func: Any, read: list[torch.Tensor], result: Any) -> bool:
    """Whether a call only gives views of the weights that it takes."""
    schema = getattr(func, "_schema", None)
    results = tensors_in(result)
    if schema is None or schema.is_mutable or not results:
        return False
    return {storage_id(t) for t in results} <= {storage_id(t) for t in read}


def _asks_form(func: Any) -> bool:
    """Whether a call looks at what a tensor is and not at its elements, as fake ones are asked."""
    name = str(func).partition(".default")[0]
    return name.startswith(("prim.", "aten.sym_")) or name in _FORMS


_FORMS = frozenset(
    f"aten.{name}"
    for name in ("dim", "size", "stride", "numel", "is_contiguous", "is_strides_like_format")
)

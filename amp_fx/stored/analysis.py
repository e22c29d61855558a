"""Finds weights of a model that may be stored low, and why the others stay as they are.

How eager code reads weights: seen below autocast, whatever Python wrote the reading.

A graph shows what Dynamo captured. Uncompiled, a program may do something else: kernels that
take a whole layer, branches for ``torch.compiler.is_compiling()``, code that Dynamo never sees.
So the program is run on a stand-in too, and every op that takes a weight is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.entry import NEEDS_NUMBERS, Request, capture_call
from amp_fx.explanation.recorder import weights_of
from amp_fx.explanation.running import fake_stand_in, module_tensors, real_stand_in, shared_weights
from amp_fx.graphs.casts import is_widening
from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.passes.low_reads import LOW_DTYPES
from amp_fx.policies.calls import CAST
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import is_functorch_wrapped_tensor
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.modes import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amp_fx.explanation.running import StandIn
    from amp_fx.policies.policy import Policy


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [t for t in _plain_tensors(args, kwargs) if storage_id(t) in self._names]
        is_cast = bool(read) and _is_plain_cast(func, kwargs)
        is_cast = is_cast and read[0].dtype == torch.float32 and kwargs["dtype"] in LOW_DTYPES
        if not (is_cast or _asks_form(func) or self._keeps_bits(func, args, kwargs)):
            self.calls.append(self._seen(func, args, kwargs))
        result = func(*args, **kwargs)
        if is_cast:
            name = self._names[storage_id(read[0])]
            self.dtypes.setdefault(name, set()).add(result.dtype)
            self._casts[storage_id(result)] = name
            self._held.append(result)
        elif _is_plain_cast(func, kwargs) and is_widening(args[0].dtype, result.dtype):
            self._widened[storage_id(result)] = args[0].dtype
            self._held.append(result)
        elif not (_is_view(func, read, result) or _asks_form(func)):
            for tensor in read:
                self.others.setdefault(self._names[storage_id(tensor)], str(func))
        return result

    def reasons(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, str]:
        """Why weights may not be stored in a dtype, as far as this run tells; or ``""``."""
        return {name: self._reason(name, dtype) for name in names}

    def _reason(self, name: str, dtype: torch.dtype) -> str:
        if name in self.others:
            return f"read as it is: {self.others[name].removesuffix('.default')}"
        found = self.dtypes.get(name, set())
        others = ", ".join(sorted(dtype_name(d) for d in found - {dtype}))
        if others:
            return f"read in {others}"
        return "" if found else "nothing reads it in this call"

    def hand_out(self, outputs: Any) -> None:
        """Notes the weights among what the program gives."""
        for tensor in _plain_tensors(pytree.tree_leaves(outputs)):
            if storage_id(tensor) in self._names:
                self.others[self._names[storage_id(tensor)]] = "the model's output"

    def _keeps_bits(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns True if a call widens a tensor, or takes a widened one back; writes end that."""
        tensors = _plain_tensors(args, kwargs)
        if not _is_plain_cast(func, kwargs) or not tensors:
            if getattr(getattr(func, "_schema", None), "is_mutable", True):
                for tensor in tensors:
                    self._widened.pop(storage_id(tensor), None)
            return False
        source, dtype = tensors[0], kwargs["dtype"]
        return is_widening(source.dtype, dtype) or self._widened.get(storage_id(source)) == dtype

    def _seen(self, func: Any, args: Any, kwargs: Any) -> SeenCall:
        texts, weights = [str(func)], set()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                name = self._weight(leaf)
                weights.add(name)
                texts.append(f"{name or leaf.dtype}{tuple(leaf.shape)}")
            else:
                texts.append(repr(leaf))
        return SeenCall(" ".join(texts), frozenset(weights - {""}))

    def _weight(self, leaf: torch.Tensor) -> str:
        """The weight that a tensor is, or a view or a cast of; ``""`` for none."""
        if not _has_storage(leaf):
            return ""
        number = storage_id(leaf)
        return self._names.get(number) or self._casts.get(number, "")


class Questions(TorchFunctionMode):
    """Notes the weights whose dtype the program's Python looks at."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.asked: set[str] = set()
        self._names = {id(tensor): name for name, tensor in weights.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            self.asked.update(self._names[id(a)] for a in args if id(a) in self._names)
        return func(*args, **(kwargs or {}))


_QUESTIONS = (
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    *(torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as),
    *(torch.Tensor.element_size, torch.Tensor.float),
)


def _plain_tensors(*values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(*values) if _has_storage(tensor)]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def _is_plain_cast(func: Any, kwargs: Mapping[str, Any]) -> bool:
    given = {name for name, value in kwargs.items() if value is not None}
    return func is CAST and given == {"dtype"}


def _is_view(func: Any, read: list[torch.Tensor], result: Any) -> bool:
    """Returns True if a call only gives views of the weights that it takes."""
    schema = getattr(func, "_schema", None)
    results = tensors_in(result)
    if schema is None or schema.is_mutable or not results:
        return False
    return {storage_id(t) for t in results} <= {storage_id(t) for t in read}


def _asks_form(func: Any) -> bool:
    """Returns True if a call reads a tensor's metadata and not its elements."""
    name = str(func).partition(".default")[0]
    return name.startswith(("prim.", "aten.sym_")) or name in _FORMS


_FORMS = frozenset(
    f"aten.{name}"
    for name in ("dim", "size", "stride", "numel", "is_contiguous", "is_strides_like_format")
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model, and the region that it is meant to run in."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device_type: str
    dtype: torch.dtype
    policy: Policy
    region: Callable[[], contextlib.AbstractContextManager[Any]]


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def reasons_to_stay(call: Call) -> dict[str, str]:
    """Why each weight has to stay as it is; ``""`` for those that may be stored low."""
    try:
        try:
            return _reasons(call, _fake)
        except (*NEEDS_NUMBERS, _EagerError):
            if real_stand_in(call.model, call.args, call.kwargs, _fake(call)) is None:
                raise
        return _reasons(call, _real)
    except (*NEEDS_NUMBERS, _EagerError) as error:
        raise UnsupportedError(
            f"{type(call.model).__name__} does not run in a region of {dtype_name(call.dtype)} "
            f"with these arguments: {error}"
        ) from error


class _EagerError(Exception):
    """A stand-in does not run uncompiled; some ops take real tensors and refuse fake ones."""


def _fake(call: Call) -> StandIn:
    return fake_stand_in(call.model, call.args, call.kwargs, call.device_type)


def _real(call: Call) -> StandIn:
    found = real_stand_in(call.model, call.args, call.kwargs, _fake(call))
    assert found is not None  # there was one a moment ago
    return found


def _reasons(call: Call, make: Callable[[Call], StandIn]) -> dict[str, str]:
    """Returns reasons by runs of stand-ins, and of others with their weights stored low."""
    reasons = _own_reasons(call.model)
    compiled, from_graphs = _compiled_run(call, make(call))
    reasons = _first_of(reasons, from_graphs)
    if not _low(reasons):
        return reasons
    runs = [_eager_run(call, make(call), has_gradients=mode) for mode in (False, True)]
    for reads, _ in runs:
        reasons = _first_of(reasons, reads.reasons(reasons, call.dtype))
    before = [compiled.calls, *(reads.calls for reads, _ in runs)]
    asked = {name for _, names in runs for name in names}
    for _ in range(_MOST_TRIES):
        differing = _differing(call, reasons, before, make)
        if not differing:
            return reasons
        low = {*_low(reasons)}
        _give_up(reasons, differing & low or asked & low or low)
    _give_up(reasons, reasons)
    return reasons


_MOST_TRIES = 4
"""How often the weights that seem to be at fault are left out, before all are."""


def _give_up(reasons: dict[str, str], names: Iterable[str]) -> None:
    for name in names:
        reasons[name] = reasons[name] or "the program does something else for another dtype"


def _differing(
    call: Call,
    reasons: Mapping[str, str],
    before: list[list[SeenCall]],
    make: Callable[[Call], StandIn],
) -> set[str]:
    """Weights in calls that are others once weights are stored; ``{""}`` if those have none."""
    if not _low(reasons):
        return set()
    found: set[str] = set()
    for old, new in zip(before, _calls_stored(call, _low(reasons), make), strict=True):
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for kind, *bounds in matcher.get_opcodes():
            if kind != "equal":
                first, last, start, stop = bounds
                changed = (*old[first:last], *new[start:stop])
                found |= {name for seen in changed for name in seen.weights or ("",)}
    return found


def _first_of(reasons: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    return {name: reason or more.get(name, "") for name, reason in reasons.items()}


def _low(reasons: Mapping[str, str]) -> list[str]:
    return [name for name, reason in reasons.items() if not reason]


# What the model itself tells


def _own_reasons(model: nn.Module) -> dict[str, str]:
    weights = named_weights(model)
    others = Counter(storage_id(t) for t in {id(t): t for t in module_tensors(model)}.values())
    holders = Counter(storage_id(tensor) for tensor in weights.values() if _is_plain(tensor))
    reasons = {}
    for name, tensor in weights.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if not _is_plain(tensor):
            layout = str(tensor.layout).removeprefix("torch.")
            reasons[name] = f"is a {type(tensor).__name__}, {layout}"
        elif tensor.dtype != torch.float32:
            reasons[name] = f"is {dtype_name(tensor.dtype)}"
        elif "parametrizations" in name.split("."):
            reasons[name] = "belongs to a parametrization"
        elif owner._forward_hooks or owner._forward_pre_hooks:
            reasons[name] = "its module has hooks"
        elif max(holders[storage_id(tensor)], others[storage_id(tensor)]) > 1:
            reasons[name] = "tied, or shares memory with another tensor"
        else:
            reasons[name] = ""
    return reasons


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in (nn.Parameter, torch.Tensor, nn.Buffer)
    is_fake = isinstance(tensor, FakeTensor)
    return (is_own or is_fake) and tensor.layout is torch.strided


# What runs of it tell


def _compiled_run(call: Call, stand_in: StandIn) -> tuple[Reads, dict[str, str]]:
    """Finds what the compiled program does without gradients, and which weights must stay."""
    weights = named_weights(_module(stand_in))
    reads = Reads(weights)
    request = Request(call.dtype, call.policy, options={"weight_cache": False})
    with torch.no_grad(), call.region():
        capture = capture_call(stand_in, request, lambda: reads)
    found = dict.fromkeys(weights, _UNREAD)
    for weight in (weight for seen in capture.graphs for weight in weights_of(seen)):
        is_low = weight.low_dtype == dtype_name(call.dtype)
        is_fine = is_low and found[weight.path] in ("", _UNREAD)  # in each graph that reads it
        found[weight.path] = "" if is_fine else _AS_IT_IS
    if not capture.is_whole:  # code between the graphs has run, too
        found = _first_of(found, reads.reasons(found, call.dtype))
    found |= dict.fromkeys(shared_weights(stand_in.program, capture.outputs), _HANDED_OUT)
    has_fallback = any(seen.fallback for seen in capture.graphs)
    capture.release()
    return reads, dict.fromkeys(weights, _FALLBACK) if has_fallback else found


_UNREAD = "nothing reads it in this call"
_AS_IT_IS = "read as it is"
_HANDED_OUT = "the model hands it out"
_FALLBACK = "fallback: other code may read it"


def _module(stand_in: StandIn) -> nn.Module:
    assert isinstance(stand_in.program, nn.Module)
    return stand_in.program


def _eager_run(call: Call, stand_in: StandIn, *, has_gradients: bool) -> tuple[Reads, set[str]]:
    """Finds what eager code does in the region, and the weights whose dtype it asks for."""
    weights = named_weights(_module(stand_in))
    reads, questions = Reads(weights), Questions(weights)
    fake_mode = stand_in.fake_mode or contextlib.nullcontext()
    gradients = torch.enable_grad() if has_gradients else torch.no_grad()
    with torch.random.fork_rng(devices=()), fake_mode, call.region(), gradients, reads, questions:
        try:
            reads.hand_out(stand_in.program(*stand_in.args, **stand_in.kwargs))
        except NEEDS_NUMBERS:
            raise
        except Exception as error:
            raise _EagerError(f"{type(error).__name__}: {error}") from error
    return reads, questions.asked


def _calls_stored(
    call: Call, names: list[str], make: Callable[[Call], StandIn]
) -> list[list[SeenCall]]:
    """The calls of a compiled run and two eager ones of a program with weights stored low."""
    compiled, *eager = [make(call) for _ in range(3)]
    for stand_in in (compiled, *eager):
        weights = named_weights(_module(stand_in))
        for name in names:
            store(weights[name], call.dtype)
    modes = zip(eager, (False, True), strict=True)
    runs = [_eager_run(call, each, has_gradients=mode) for each, mode in modes]
    return [reads.calls for reads, _ in (_compiled_run(call, compiled), *runs)]


def store(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Makes a tensor low, in place: whoever holds it holds the low one."""
    with torch.no_grad():
        tensor.data = tensor.data.to(dtype)

"""Determines which weights of a model may be stored low, and reasons against the others.

A graph contains what Dynamo captured. The uncompiled program may read weights differently: in
kernels for whole layers, in branches on ``torch.compiler.is_compiling()``, or in code that Dynamo
skips. A stand-in of the program is therefore also run eagerly, under a dispatch mode that inspects
every op below autocast.
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

from amp_fx.dtypes import dtype_name, is_low
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.entry import NEEDS_NUMBERS, ExplainRequest, capture_call
from amp_fx.explanation.recorder import weights_of
from amp_fx.explanation.running import fake_stand_in, module_tensors, real_stand_in, shared_weights
from amp_fx.graphs.casts import is_widening
from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.policies.calls import TO_COPY
from amp_fx.random_states import random_states_kept
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
    """One call of an op. Calls compare equal by ``text``.

    Attributes:
        text: The op and its arguments; weights are represented by name, other tensors by dtype.
        weights: The weights that it reads, directly or through casts.
    """

    text: str
    weights: frozenset[str] = dataclasses.field(compare=False)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records reads of weights and all other calls.

    Weights that share memory are recorded under one of their names.

    Attributes:
        dtypes: For each weight, the dtypes of its casts.
        others: For each weight that is written or read without a cast, one op that does so.
        calls: All calls except casts of float32 weights and lossless casts back and forth. These
            lists are equal if a program performs the same computation on weights of another dtype.
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
        self._results: list[torch.Tensor] = []  # referenced so that storage ids are not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [t for t in _plain_tensors(args, kwargs) if storage_id(t) in self._names]
        is_cast = bool(read) and _is_plain_cast(func, kwargs)
        is_cast = is_cast and read[0].dtype == torch.float32 and is_low(kwargs["dtype"])
        if not (is_cast or _reads_metadata(func) or self._is_lossless(func, args, kwargs)):
            self.calls.append(self._as_call(func, args, kwargs))
        result = func(*args, **kwargs)
        if is_cast:
            name = self._names[storage_id(read[0])]
            self.dtypes.setdefault(name, set()).add(result.dtype)
            self._casts[storage_id(result)] = name
            self._results.append(result)
        elif _is_plain_cast(func, kwargs) and is_widening(args[0].dtype, result.dtype):
            self._widened[storage_id(result)] = args[0].dtype
            self._results.append(result)
        elif not (_is_view(func, read, result) or _reads_metadata(func)):
            for tensor in read:
                self.others.setdefault(self._names[storage_id(tensor)], str(func))
        return result

    def reasons(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, str]:
        """Returns the reasons of this run against storing weights in a dtype, or ``""``."""
        return {name: self._reason(name, dtype) for name in names}

    def _reason(self, name: str, dtype: torch.dtype) -> str:
        if name in self.others:
            return f"read without a cast: {self.others[name].removesuffix('.default')}"
        dtypes = self.dtypes.get(name, set())
        others = ", ".join(sorted(dtype_name(d) for d in dtypes - {dtype}))
        if others:
            return f"read in {others}"
        return "" if dtypes else _UNREAD

    def record_outputs(self, outputs: Any) -> None:
        """Records the weights among the outputs of the program."""
        for tensor in _plain_tensors(pytree.tree_leaves(outputs)):
            if storage_id(tensor) in self._names:
                self.others[self._names[storage_id(tensor)]] = "the model's output"

    def _is_lossless(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns True if a call widens a tensor, or casts a widened tensor back.

        A widened tensor that was written cannot be cast back without loss.
        """
        tensors = _plain_tensors(args, kwargs)
        if not _is_plain_cast(func, kwargs) or not tensors:
            if getattr(getattr(func, "_schema", None), "is_mutable", True):
                for tensor in tensors:
                    self._widened.pop(storage_id(tensor), None)
            return False
        source, dtype = tensors[0], kwargs["dtype"]
        return is_widening(source.dtype, dtype) or self._widened.get(storage_id(source)) == dtype

    def _as_call(self, func: Any, args: Any, kwargs: Any) -> SeenCall:
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
        """Returns the weight that a tensor is a view or cast of; ``""`` if there is none."""
        if not _has_storage(leaf):
            return ""
        storage = storage_id(leaf)
        return self._names.get(storage) or self._casts.get(storage, "")


class DtypeQueries(TorchFunctionMode):
    """Function mode that records the weights whose dtype Python code reads.

    Attributes:
        names: Names of these weights.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._names_by_id = {id(tensor): name for name, tensor in weights.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DTYPE_QUERIES:
            self.names.update(self._names_by_id[id(a)] for a in args if id(a) in self._names_by_id)
        return func(*args, **(kwargs or {}))


_DTYPE_QUERIES = (
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
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def _is_plain_cast(func: Any, kwargs: Mapping[str, Any]) -> bool:
    passed = {name for name, value in kwargs.items() if value is not None}
    return func is TO_COPY and passed == {"dtype"}


def _is_view(func: Any, read: list[torch.Tensor], result: Any) -> bool:
    """Returns True if a call only returns views of the weights that it reads."""
    schema = getattr(func, "_schema", None)
    results = tensors_in(result)
    if schema is None or schema.is_mutable or not results:
        return False
    return {storage_id(t) for t in results} <= {storage_id(t) for t in read}


def _reads_metadata(func: Any) -> bool:
    """Returns True if an op reads the metadata of a tensor but not its elements."""
    name = str(func).partition(".default")[0]
    return name.startswith(("prim.", "aten.sym_")) or name in _METADATA_OPS


_METADATA_OPS = frozenset(
    {
        "aten.dim",
        "aten.size",
        "aten.stride",
        "aten.numel",
        "aten.is_contiguous",
        "aten.is_strides_like_format",
    }
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model, and the region that it will run in."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device_type: str
    dtype: torch.dtype
    policy: Policy
    region: Callable[[], contextlib.AbstractContextManager[Any]]


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def reasons_to_stay(call: Call) -> dict[str, str]:
    """Returns the reason against storing each weight low; ``""`` if there is none."""
    try:
        try:
            return _reasons(call, _fake)
        except (*NEEDS_NUMBERS, _EagerError):
            if real_stand_in(call.model, call.args, call.kwargs, _fake(call)) is None:
                raise
        return _reasons(call, _real)
    except (*NEEDS_NUMBERS, _EagerError) as error:
        raise UnsupportedError(
            f"{type(call.model).__name__} does not run in a {dtype_name(call.dtype)} region with "
            f"these arguments: {error}"
        ) from error


class _EagerError(Exception):
    """Raised if a stand-in does not run uncompiled; some ops reject fake tensors."""


def _fake(call: Call) -> StandIn:
    return fake_stand_in(call.model, call.args, call.kwargs, call.device_type)


def _real(call: Call) -> StandIn:
    stand_in = real_stand_in(call.model, call.args, call.kwargs, _fake(call))
    assert stand_in is not None, "checked by reasons_to_stay"
    return stand_in


def _reasons(call: Call, make: Callable[[Call], StandIn]) -> dict[str, str]:
    """Returns the reasons against storing weights low.

    Runs stand-ins with the original weights, then stand-ins with low weights. If the latter perform
    other calls, excludes the weights in these calls and tries again.
    """
    reasons = _module_reasons(call.model)
    compiled, from_graphs = _compiled_run(call, make(call))
    reasons = _first_of(reasons, from_graphs)
    if not _low(reasons):
        return reasons
    runs = [_eager_run(call, make(call), has_gradients=mode) for mode in (False, True)]
    for reads, _ in runs:
        reasons = _first_of(reasons, reads.reasons(reasons, call.dtype))
    before = [compiled.calls, *(reads.calls for reads, _ in runs)]
    queried = {name for _, names in runs for name in names}
    for _ in range(_MAX_TRIES):
        differing = _differing(call, reasons, before, make)
        if not differing:
            return reasons
        low = {*_low(reasons)}
        _exclude(reasons, differing & low or queried & low or low)
    _exclude(reasons, reasons)
    return reasons


_MAX_TRIES = 4
"""Maximum number of exclusions before all weights are excluded."""


def _exclude(reasons: dict[str, str], names: Iterable[str]) -> None:
    for name in names:
        reasons[name] = reasons[name] or "the program depends on its dtype"


def _differing(
    call: Call,
    reasons: Mapping[str, str],
    before: list[list[SeenCall]],
    make: Callable[[Call], StandIn],
) -> set[str]:
    """Returns the weights in calls that change if weights are stored low.

    Contains ``""`` if a call without weights changes.
    """
    if not _low(reasons):
        return set()
    differing: set[str] = set()
    for old, new in zip(before, _calls_stored(call, _low(reasons), make), strict=True):
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for kind, *bounds in matcher.get_opcodes():
            if kind != "equal":
                first, last, start, stop = bounds
                for changed in (*old[first:last], *new[start:stop]):
                    differing |= changed.weights or {""}
    return differing


def _first_of(reasons: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    return {name: reason or more.get(name, "") for name, reason in reasons.items()}


def _low(reasons: Mapping[str, str]) -> list[str]:
    return [name for name, reason in reasons.items() if not reason]


def _module_reasons(model: nn.Module) -> dict[str, str]:
    """Returns the reasons that follow from the modules, without running the model."""
    weights = named_weights(model)
    distinct = {id(t): t for t in module_tensors(model)}
    num_tensors = Counter(storage_id(tensor) for tensor in distinct.values())
    num_names = Counter(storage_id(tensor) for tensor in weights.values() if _is_plain(tensor))
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
        elif max(num_names[storage_id(tensor)], num_tensors[storage_id(tensor)]) > 1:
            reasons[name] = "tied, or shares memory with another tensor"
        else:
            reasons[name] = ""
    return reasons


def _is_plain(tensor: torch.Tensor) -> bool:
    is_tensor_or_parameter = type(tensor) in (nn.Parameter, torch.Tensor, nn.Buffer)
    is_fake = isinstance(tensor, FakeTensor)
    return (is_tensor_or_parameter or is_fake) and tensor.layout is torch.strided


def _compiled_run(call: Call, stand_in: StandIn) -> tuple[Reads, dict[str, str]]:
    """Returns the calls of the compiled program without gradients, and reasons from its graphs."""
    weights = named_weights(_module(stand_in))
    reads = Reads(weights)
    request = ExplainRequest(call.dtype, call.policy, options={"weight_cache": False})
    with torch.no_grad(), call.region():
        capture = capture_call(stand_in, request, lambda: reads)
    reasons = dict.fromkeys(weights, _UNREAD)
    for graph in capture.graphs:
        for weight in weights_of(graph):
            is_low = weight.low_dtype == dtype_name(call.dtype)
            is_low_everywhere = is_low and reasons[weight.path] in ("", _UNREAD)
            reasons[weight.path] = "" if is_low_everywhere else _READ_WITHOUT_CAST
    if not capture.is_whole:  # Python code between the graphs may have read weights
        reasons = _first_of(reasons, reads.reasons(reasons, call.dtype))
    reasons |= dict.fromkeys(shared_weights(stand_in.program, capture.outputs), _RETURNED)
    has_fallback = any(graph.fallback for graph in capture.graphs)
    capture.release()
    return reads, dict.fromkeys(weights, _FALLBACK) if has_fallback else reasons


_UNREAD = "not read in this call"
_READ_WITHOUT_CAST = "read without a cast"
_RETURNED = "returned by the model"
_FALLBACK = "fallback: other code may read it"


def _module(stand_in: StandIn) -> nn.Module:
    assert isinstance(stand_in.program, nn.Module)
    return stand_in.program


def _eager_run(call: Call, stand_in: StandIn, *, has_gradients: bool) -> tuple[Reads, set[str]]:
    """Returns the calls of eager code in the region, and the weights whose dtype it reads."""
    weights = named_weights(_module(stand_in))
    reads, queries = Reads(weights), DtypeQueries(weights)
    fake_mode = stand_in.fake_mode or contextlib.nullcontext()
    gradients = torch.enable_grad() if has_gradients else torch.no_grad()
    with random_states_kept(), fake_mode, call.region(), gradients, reads, queries:
        try:
            reads.record_outputs(stand_in.program(*stand_in.args, **stand_in.kwargs))
        except NEEDS_NUMBERS:
            raise
        except Exception as error:
            raise _EagerError(f"{type(error).__name__}: {error}") from error
    return reads, queries.names


def _calls_stored(
    call: Call, names: list[str], make: Callable[[Call], StandIn]
) -> list[list[SeenCall]]:
    """Returns the calls of one compiled and two eager runs with weights stored low."""

    def make_low() -> StandIn:
        stand_in = make(call)
        weights = named_weights(_module(stand_in))
        for name in names:
            store(weights[name], call.dtype)
        return stand_in

    compiled, _ = _compiled_run(call, make_low())
    eager = [_eager_run(call, make_low(), has_gradients=mode) for mode in (False, True)]
    return [compiled.calls, *(reads.calls for reads, _ in eager)]


def store(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Converts a tensor in place."""
    with torch.no_grad():
        tensor.data = tensor.data.to(dtype)

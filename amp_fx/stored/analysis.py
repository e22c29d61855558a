"""Determines which weights of a model may be stored low, and reasons against the others.

Candidates are the weights that every captured graph reads through casts only. A graph does not show
all reads: a program has other branches for ``torch.compiler.is_compiling()``, and code that Dynamo
skips. A copy of the program is therefore run eagerly, under a dispatch mode that sees every op
below autocast. A second copy is run with low candidates. Those that change a bit of the results
stay, because the program depends on their dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.entry import explain
from amp_fx.explanation.running import copy_module, fake_stand_in, leaf_tensors, module_tensors
from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.observe.step import copied
from amp_fx.policies.calls import TO_COPY
from amp_fx.random_states import preserve_random_states
from amp_fx.torch_private.autograd import is_functorch_wrapped_tensor
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.modes import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from amp_fx.policies.policy import Policy


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


def store(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Converts a tensor in place."""
    with torch.no_grad():
        tensor.data = tensor.data.to(dtype)


def reasons_to_stay(call: Call) -> dict[str, str]:
    """Returns the reason against storing each weight low; ``""`` if there is none.

    Raises:
        UnsupportedError: The model does not run in the region.
    """
    reasons = _reasons_of_modules(call.model)
    reads = _Reads(call.dtype)
    try:
        results = _run(call, [], reads)
    except Exception as error:
        raise UnsupportedError(
            f"{type(call.model).__name__} does not run in a {dtype_name(call.dtype)} region with "
            f"these arguments: {type(error).__name__}: {error}"
        ) from error
    for name, reason in reasons.items():
        reasons[name] = reason or reads.reasons.get(name, "not read in this call")
    if "" in reasons.values():
        by_graph = _reasons_of_graphs(call)
        reasons = {name: reason or by_graph.get(name, "") for name, reason in reasons.items()}

    def changes(low: list[str]) -> bool:
        try:
            found = _run(call, low, _Reads(call.dtype))
            torch.testing.assert_close(found, results, rtol=0, atol=0, equal_nan=True)
        except Exception:  # noqa: BLE001 - a program may raise anything for another dtype
            return True
        return False

    for name in _bisect([name for name, reason in reasons.items() if not reason], changes):
        reasons[name] = "the program depends on its dtype"
    return reasons


def _bisect(names: list[str], changes: Callable[[list[str]], bool]) -> list[str]:
    """Returns names without which the others change nothing: few, if few change something."""
    if not names or not changes(names):
        return []
    if len(names) == 1:
        return names
    middle = len(names) // 2
    found = [*_bisect(names[:middle], changes), *_bisect(names[middle:], changes)]
    # Some names only change something together.
    is_complete = not changes([name for name in names if name not in found])
    return found if is_complete else names


def _reasons_of_modules(model: nn.Module) -> dict[str, str]:
    weights = named_weights(model)
    # A tensor of its own is counted once as a weight, and once among the tensors of modules.
    counts = Counter(map(storage_id, [*weights.values(), *module_tensors(model)]))
    reasons = dict.fromkeys(weights, "")
    for name, tensor in weights.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_plain = type(tensor) in (nn.Parameter, torch.Tensor, nn.Buffer, FakeTensor)
        if not is_plain or tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            reasons[name] = f"is a {type(tensor).__name__}, {layout}"
        elif tensor.dtype != torch.float32:
            reasons[name] = f"is {dtype_name(tensor.dtype)}"
        elif "parametrizations" in name.split("."):
            reasons[name] = "belongs to a parametrization"
        elif owner._forward_hooks or owner._forward_pre_hooks:
            reasons[name] = "its module has hooks"
        elif counts[storage_id(tensor)] > 2:
            reasons[name] = "tied, or shares memory with another tensor"
    return reasons


def _reasons_of_graphs(call: Call) -> dict[str, str]:
    """Returns the reasons of weights that the graphs of the compiled program read."""
    explain_call = explain(
        call.model,
        dtype=call.dtype,
        policy=call.policy,
        device_type=call.device_type,
        options={"weight_cache": False},
    )
    with torch.no_grad(), call.region():
        explanation = explain_call(*call.args, **call.kwargs)
    reasons: dict[str, str] = {}
    for graph in explanation.forward:
        for weight in graph.weights:
            is_low = weight.low_dtype == dtype_name(call.dtype)
            reasons[weight.path] = reasons.get(weight.path) or (
                "" if is_low else "read without a cast"
            )
    if any(graph.fallback for graph in explanation.graphs):
        return dict.fromkeys(reasons, "fallback: other code may read it")
    return reasons


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records how a program reads weights.

    Attributes:
        names: Names of the weights by storage.
        reasons: For each weight that is read, the reason against storing it low, or ``""``.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.reasons: dict[str, str] = {}
        self._dtype = dtype

    def add(self, tensors: Iterable[torch.Tensor], reason: str) -> None:
        """Adds a reason against the weights among some tensors; the first reason counts."""
        for tensor in tensors:
            name = self.names.get(_storage_of(tensor))
            if name is not None:
                self.reasons[name] = self.reasons.get(name) or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        result = func(*args, **kwargs)
        results = tensors_in(result)
        if func is TO_COPY and kwargs.get("dtype") is self._dtype:
            self.add(tensors, "")
            return result
        is_view = {*map(_storage_of, results)} & {*map(_storage_of, tensors)}
        # Without results, the op of a fake tensor only reads its metadata.
        is_metadata = not results and any(isinstance(tensor, FakeTensor) for tensor in tensors)
        schema = getattr(func, "_schema", None)
        if not (is_view or is_metadata) or schema is None or schema.is_mutable:
            self.add(tensors, f"read without a cast: {str(func).removesuffix('.default')}")
        return result


def _storage_of(tensor: torch.Tensor) -> int:
    return 0 if is_functorch_wrapped_tensor(tensor) else storage_id(tensor)


def _run(call: Call, low: list[str], reads: _Reads) -> list[torch.Tensor]:
    """Runs a copy of the program without and with gradients.

    Args:
        call: The call.
        low: The weights to store low in the copy.
        reads: The mode around the runs.

    Returns:
        The tensors that the program returns; meta tensors if they are fake.
    """
    given = [*module_tensors(call.model), *leaf_tensors((call.args, call.kwargs))]
    fake_mode: contextlib.AbstractContextManager[Any] | None = None
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given):
        fakes = fake_stand_in(call.model, call.args, call.kwargs, call.device_type)
        fake_mode, args, kwargs = fakes.fake_mode, fakes.args, fakes.kwargs
        program: Any = fakes.program
    else:
        program = copy_module(call.model, {})
        args, kwargs = copied((call.args, call.kwargs))
    weights = named_weights(program)
    for name in low:
        store(weights[name], call.dtype)
    reads.names = {storage_id(tensor): name for name, tensor in weights.items()}
    tensors: list[torch.Tensor] = []
    for has_gradients in (False, True):
        with (
            preserve_random_states(),
            fake_mode or contextlib.nullcontext(),
            call.region(),
            torch.set_grad_enabled(has_gradients),
            reads,
        ):
            tensors += leaf_tensors(program(*args, **kwargs))
    reads.add(tensors, "returned by the model")
    if fake_mode is None:
        return tensors
    return [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]

"""Determines which weights of a model may be stored low, and reasons against the others.

Candidates are the weights that every captured graph reads through casts only. A graph does not show
all reads: a program has other branches for ``torch.compiler.is_compiling()``, and code that Dynamo
skips. So a copy of the program is run eagerly, under a dispatch mode that sees every op below
autocast. A second copy is run with low candidates. A smallest set of candidates that change a bit
of the results stays, because the program depends on their dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.running import (
    copy_module,
    fake_stand_in,
    has_hooks,
    leaf_tensors,
    module_tensors,
)
from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.numerics.minimizer import Minimizer
from amp_fx.observe.step import copied
from amp_fx.policies.calls import TO_COPY
from amp_fx.random_states import preserve_random_states
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private.autograd import is_functorch_wrapped_tensor
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.modes import TorchDispatchMode
from amp_fx.weights.cache_entry import same_bits

if TYPE_CHECKING:
    from amp_fx.explanation.explanation import Explanation

MOST_RUNS = 200
"""Maximum number of runs that look for the weights on whose dtype the program depends."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model.

    Attributes:
        model: The model, which is not changed.
        args: Its arguments.
        kwargs: Its named arguments.
        explanation: What amp_fx does to the model.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    explanation: Explanation

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of low-precision ops."""
        dtype: torch.dtype = getattr(torch, self.explanation.dtype)
        return dtype

    def run(self, low: tuple[str, ...], reads: _Reads) -> list[torch.Tensor]:
        """Runs a copy of the model eagerly, without and with gradients, and returns the results.

        Args:
            low: The weights that the copy stores low.
            reads: The mode around the runs.
        """
        device_type = self.explanation.device_type
        given = [*module_tensors(self.model), *leaf_tensors((self.args, self.kwargs))]
        mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given):
            fakes = fake_stand_in(self.model, self.args, self.kwargs, device_type)
            program: Any = fakes.program
            args, kwargs, mode = fakes.args, fakes.kwargs, fakes.fake_mode
        else:
            program = copy_module(self.model, {})
            args, kwargs = copied((self.args, self.kwargs))
        weights = named_weights(program)
        for name in low:
            store(weights[name], self.dtype)
        reads.names = {storage_id(tensor): name for name, tensor in weights.items()}
        results: list[torch.Tensor] = []
        for has_gradients in (False, True):
            with (
                preserve_random_states(),
                mode,
                no_autocast(),
                torch.autocast(device_type, self.dtype),
                torch.set_grad_enabled(has_gradients),
                reads,
            ):
                outputs = leaf_tensors(program(*args, **kwargs))
            results += [output.detach() for output in outputs]
        return results


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that finds the weights that eager code reads without a cast.

    The results of a run do not show all such reads, because a later op may round the difference
    away.

    Attributes:
        names: Names of the weights by storage.
        ops: The last op that reads a weight without a cast, by the name of the weight.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.ops: dict[str, str] = {}
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        storages = {*map(_storage_of, tensors)}
        result = func(*args, **kwargs)
        results = tensors_in(result)
        is_cast = func is TO_COPY and kwargs.get("dtype") is self._dtype
        is_view = not storages.isdisjoint(map(_storage_of, results))
        # Without results, the op of a fake tensor only reads its metadata.
        is_metadata = not results and any(isinstance(tensor, FakeTensor) for tensor in tensors)
        schema = getattr(func, "_schema", None)
        is_pure = schema is not None and not schema.is_mutable
        if not (is_cast or (is_pure and (is_view or is_metadata))):
            read = self.names.keys() & storages
            op = str(func).removesuffix(".default")
            self.ops.update((self.names[storage], op) for storage in read)
        return result


def _storage_of(tensor: torch.Tensor) -> int:
    return 0 if is_functorch_wrapped_tensor(tensor) else storage_id(tensor)


def named_weights(model: Any) -> dict[str, torch.Tensor]:
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
    """Returns the reason against storing each weight low; ``""`` if there is none."""
    by_graph = _reasons_of_graphs(call.explanation)
    shared = dict.fromkeys(call.explanation.shared, "tied, or shares memory with another tensor")
    eager = _Reads(call.dtype)
    expected = call.run((), eager)
    by_op = {name: f"read without a cast: {op}" for name, op in eager.ops.items()}
    reasons = {
        name: _reason_of_module(call.model, name, tensor)
        or shared.get(name)
        or by_op.get(name)
        or by_graph.get(name, "no graph of this call reads it")
        for name, tensor in named_weights(call.model).items()
    }
    candidates = [name for name, reason in reasons.items() if not reason]

    def is_enough(stay: tuple[str, ...]) -> bool:
        low = tuple(name for name in candidates if name not in stay)
        try:
            found = call.run(low, _Reads(call.dtype))
        except Exception:  # noqa: BLE001 - a program may raise anything for another dtype
            return False
        return len(found) == len(expected) and all(map(_is_same, found, expected))

    chosen = Minimizer(candidates, is_enough, budget=MOST_RUNS).run().chosen
    for name in candidates if chosen is None else chosen:
        reasons[name] = "the program depends on its dtype"
    return reasons


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if isinstance(left, FakeTensor):
        return left.dtype == right.dtype and left.shape == right.shape
    return same_bits(left, right)


def _reason_of_module(model: nn.Module, name: str, tensor: torch.Tensor) -> str:
    """Returns a reason that no graph shows."""
    is_plain = type(tensor) in (nn.Parameter, torch.Tensor, nn.Buffer, FakeTensor)
    if not is_plain or tensor.layout is not torch.strided:
        return f"is a {type(tensor).__name__}, {str(tensor.layout).removeprefix('torch.')}"
    if tensor.dtype != torch.float32:
        return f"is {dtype_name(tensor.dtype)}"
    if "parametrizations" in name.split("."):
        return "belongs to a parametrization"
    owner = model.get_submodule(name.rpartition(".")[0])
    return "its module has hooks" if has_hooks(owner) else ""


def _reasons_of_graphs(explanation: Explanation) -> dict[str, str]:
    """Returns the reason against each weight that a graph reads; ``""`` if all graphs cast it."""
    reasons: dict[str, str] = {}
    for graph in explanation.forward:
        for weight in graph.weights:
            is_low = weight.low_dtype == explanation.dtype
            reason = "" if is_low else "compiled code reads it without a cast"
            reasons[weight.path] = reasons.get(weight.path) or reason
    return reasons

"""Which weights of a model may be stored low, and why the others stay as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.errors import ExplainError
from amp_fx.explanation.entry import NEEDS_NUMBERS, Request, capture_call
from amp_fx.explanation.graphs import weights_of
from amp_fx.explanation.stand_in import (
    fake_stand_in,
    module_tensors,
    real_stand_in,
    shared_weights,
)
from amp_fx.graphs.values import storage_id
from amp_fx.stored.reads import Questions, Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amp_fx.explanation.running import Capture
    from amp_fx.explanation.stand_in import StandIn
    from amp_fx.policies.policy import Policy
    from amp_fx.stored.reads import SeenCall


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model, and the region that it is meant to run in.

    Attributes:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        device_type: The device type of the region.
        dtype: The low dtype of the region.
        policy: Its policy.
        region: Enters the region.
    """

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
        return _reasons(call, _fake)
    except (*NEEDS_NUMBERS, _EagerError) as error:
        if real_stand_in(call.model, call.args, call.kwargs, _fake(call)) is None:
            raise _as_explain_error(call, error) from error
    try:
        return _reasons(call, _real)
    except _EagerError as error:
        raise _as_explain_error(call, error) from error


class _EagerError(Exception):
    """A stand-in does not run uncompiled; some ops take real tensors and refuse fake ones."""


def _as_explain_error(call: Call, error: Exception) -> ExplainError:
    return ExplainError(
        f"{type(call.model).__name__} does not run in a region of {dtype_name(call.dtype)} with "
        f"these arguments: {error}"
    )


def _fake(call: Call) -> StandIn:
    return fake_stand_in(call.model, call.args, call.kwargs, call.device_type)


def _real(call: Call) -> StandIn:
    found = real_stand_in(call.model, call.args, call.kwargs, _fake(call))
    assert found is not None  # there was one a moment ago
    return found


def _reasons(call: Call, make: Callable[[Call], StandIn]) -> dict[str, str]:
    """The same by runs of stand-ins, and of others with their weights stored low."""
    reasons = _own_reasons(call.model)
    compiled, from_graphs = _compiled_run(call, make(call))
    reasons = _first_of(reasons, from_graphs)
    if not _low(reasons):
        return reasons
    runs = [_eager_run(call, make(call), has_gradients=mode) for mode in (False, True)]
    for reads, _ in runs:
        reasons = _first_of(reasons, {name: reads.reason(name, call.dtype) for name in reasons})
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
        reasons[name] = _own_reason(tensor) or _owner_reason(owner, name)
        if not reasons[name] and max(holders[storage_id(tensor)], others[storage_id(tensor)]) > 1:
            reasons[name] = "tied, or shares memory with another tensor"
    return reasons


def _own_reason(tensor: torch.Tensor) -> str:
    if not _is_plain(tensor):
        return f"is a {type(tensor).__name__}, {str(tensor.layout).removeprefix('torch.')}"
    return "" if tensor.dtype == torch.float32 else f"is {dtype_name(tensor.dtype)}"


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in (nn.Parameter, torch.Tensor, nn.Buffer) or _is_fake(tensor)
    return is_own and tensor.layout is torch.strided


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _owner_reason(owner: nn.Module, name: str) -> str:
    if "parametrizations" in name.split("."):
        return "belongs to a parametrization"
    if owner._forward_hooks or owner._forward_pre_hooks:
        return "its module has hooks"
    return ""


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
        found[weight.path] = "" if is_low else _AS_IT_IS
    found |= dict.fromkeys(shared_weights(stand_in.program, capture.outputs), _HANDED_OUT)
    why = _why_not_whole(capture)
    capture.release()
    return reads, dict.fromkeys(weights, f"{why}: other code may read it") if why else found


_UNREAD = "nothing reads it in this call"
_AS_IT_IS = "read as it is"
_HANDED_OUT = "the model hands it out"


def _why_not_whole(capture: Capture) -> str:
    """Says why one graph is not all that the model does; ``""`` if it is."""
    if capture.is_whole:
        return ""
    reasons: list[Any] = [g.captured.compile_subgraph_reason for g in capture.graphs]
    if capture.other_breaks or any(reason.graph_break for reason in reasons if reason):
        return "graph break"
    return "fallback" if any(g.fallback for g in capture.graphs) else "code around the graph"


def _module(stand_in: StandIn) -> nn.Module:
    assert isinstance(stand_in.program, nn.Module)
    return stand_in.program


def _eager_run(call: Call, stand_in: StandIn, *, has_gradients: bool) -> tuple[Reads, set[str]]:
    """Finds what eager code does in the region, and the weights whose dtype it asks for."""
    weights = named_weights(_module(stand_in))
    reads, questions = Reads(weights), Questions(weights)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        if stand_in.fake_mode is not None:
            stack.enter_context(stand_in.fake_mode)
        stack.enter_context(call.region())
        stack.enter_context(torch.set_grad_enabled(has_gradients))
        stack.enter_context(reads)
        stack.enter_context(questions)
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
    stored = [make(call) for _ in range(3)]
    for stand_in in stored:
        weights = named_weights(_module(stand_in))
        for name in names:
            store(weights[name], call.dtype)
    runs = [
        _compiled_run(call, stored[0])[0],
        _eager_run(call, stored[1], has_gradients=False)[0],
        _eager_run(call, stored[2], has_gradients=True)[0],
    ]
    return [reads.calls for reads in runs]


def store(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Makes a tensor low, in place: whoever holds it holds the low one."""
    with torch.no_grad():
        tensor.data = tensor.data.to(dtype)

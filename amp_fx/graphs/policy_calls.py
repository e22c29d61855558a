"""Runs one call of eager code under a policy, as the passes treat a node.

A call is decomposed once, on fake tensors (``decompose``), and its ops run with their casts. A
call that the policy treats as PyTorch does runs as it is, under native autocast.

Left alone on purpose: calls in place, calls that take functions (higher-order ops, hooks), nested
tensors, and what cannot be traced. They run under native autocast. Casts are not cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from amp_fx.devices.float8 import warn_of_slowness
from amp_fx.errors import BannedOpError
from amp_fx.graphs.decompose import Decomposed, Decomposer, NotPlainError, Site, call_key
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import analysis, evaluate, tensors_in
from amp_fx.policies.calls import CAST, qualified_name
from amp_fx.policies.float8 import run_float8, weight_of, why_not_float8
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import CompileFrame, current_stack, is_linear_end
from amp_fx.regions.policy_numbers import policy_of
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.registered import REGISTERED
from amp_fx.torch_private.fake_tensors import FakeTensorMode, detect_fake_mode
from amp_fx.torch_private.modes import no_dispatch_modes, no_function_modes
from amp_fx.torch_private.ops import HigherOrderOperator, OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.graphs.decompose import OpDecision
    from amp_fx.policies.calls import Call
    from amp_fx.policies.changes import ModuleStack
    from amp_fx.policies.policy import Policy


class _State(threading.local):
    is_decided = False
    """A mode has decided on the call that runs: modes around it do nothing."""


_state = _State()


def find_call(
    number: int, func: Any, args: tuple[Any, ...], kwargs: Any
) -> _Native | _Rewritten | None:
    """Returns what runs a call under a policy; None if autocast has nothing to do with it."""
    if _state.is_decided or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None
    tensors = [t for t in tensors_in(args, kwargs) if t.is_floating_point()]
    devices = {tensor.device.type for tensor in tensors}
    is_nested = any(tensor.is_nested for tensor in tensors)
    if is_nested or not any(map(_is_enabled, devices)) or _has_effects(func, args, kwargs):
        return None
    return _decided_call(number, func, args, kwargs)


def _is_enabled(device_type: str) -> bool:
    is_known = torch.amp.is_autocast_available(device_type)
    return is_known and torch.is_autocast_enabled(device_type)


_EFFECTS = ("__get__", "__set__", "__delete__", "__setitem__", "backward", "register_hook", "grad")


def _has_effects(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for functions that do more than compute tensors of tensors."""
    name = getattr(func, "__name__", "")
    if name in _EFFECTS or (name.endswith("_") and not name.endswith("__")):
        return True
    if isinstance(func, HigherOrderOperator):
        return True
    found: list[Any] = []
    map_aggregate((args, kwargs), lambda leaf: found.append(callable(leaf)))
    return any(found)


def outside_of_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and keeps Dynamo, if it is there at all, from compiling its frames."""
    return _disabled_call()(function, *args) if "torch._dynamo" in sys.modules else function(*args)


@functools.cache
def _disabled_call() -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    disabled: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled


@dataclasses.dataclass(frozen=True)
class _Native:
    """Runs a call as it is."""

    is_off: bool = False
    """Autocast is off: the policy has nothing for the call, and PyTorch has."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _decided(), no_autocast() if self.is_off else contextlib.nullcontext():
            return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """Runs the ops that a call was decomposed into."""

    graph: fx.Graph
    float8: dict[str, OpDecision]
    """The decisions on products that run in float8, by op."""
    number: int
    result_type: type
    """The class of what the call returns: ``torch.topk`` returns a named tuple."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, tensors = _as_node(func, args, kwargs)
        env: dict[fx.Node, Any] = {}
        env.update(zip(self.graph.find_nodes(op="placeholder"), tensors, strict=True))
        with _decided(), no_autocast():
            for node in self.graph.nodes:
                if node.op == "call_function":
                    env[node] = self._run_node(node, env)
        result = map_arg(self.graph.output_node().args[0], env.__getitem__)
        return self.result_type(result) if isinstance(result, (list, tuple)) else result

    def _run_node(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        decision = self.float8.get(_name_of(target))
        if decision is None:
            return target(*args, **kwargs)

        def uncast(source: fx.Node) -> Any:
            return env[source.all_input_nodes[0] if source.target is CAST else source]

        given = map_arg((node.args, node.kwargs), uncast)
        return self._run_float8((target, *given), (target, args, kwargs), decision)

    def _run_float8(self, call: Call, lowered: Call, decision: OpDecision) -> Any:
        """Runs a product in float8, if it fits and a leaf is its weight; else in the low dtype."""
        weight, has_rows = weight_of(call)
        is_end = decision.origin == "table" and weight is not None and is_linear_end(weight)
        if weight is None or is_end:
            return lowered[0](*lowered[1], **lowered[2])
        settings = policy_of(self.number).float8
        low_dtype = torch.get_autocast_dtype(decision.device_type)
        if why_not_float8(lowered, weight, low_dtype, settings, has_rows_of_outputs=has_rows):
            return lowered[0](*lowered[1], **lowered[2])
        if weight.device.type == "cpu":
            warn_of_slowness()
        return run_float8(lowered, weight, settings, has_rows_of_outputs=has_rows)


def _name_of(target: object) -> str:
    return qualified_name(target) if isinstance(target, OpOverload) else ""


@contextlib.contextmanager
def _decided() -> Iterator[None]:
    before = _state.is_decided
    _state.is_decided = True
    try:
        yield
    finally:
        _state.is_decided = before


_calls: weakref.WeakKeyDictionary[Policy, dict[object, _Native | _Rewritten]] = (
    weakref.WeakKeyDictionary()
)
"""What was found out about calls, by policy; the entries hold no policy."""
_MAX_CALLS = 10_000


def _decided_call(
    number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Native | _Rewritten:
    policy = policy_of(number)
    site = Site(AutocastState.ambient(), torch.is_grad_enabled())
    stack = current_stack() if policy.resolver.depends_on_module else ()
    node, tensors = _as_node(func, args, kwargs)
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.size()):
        return _find_out(node, tensors, site, number, stack)  # a symbol is of one graph
    calls = _calls.setdefault(policy, {})
    where = policy.resolver.stack_key(stack)
    key = call_key(node, node.all_input_nodes), site, where, len(REGISTERED)
    if key not in calls:
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        calls[key] = _find_out(node, tensors, site, number, stack)
    return calls[key]


def _as_node(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Node, list[torch.Tensor]]:
    """Returns a call as a node of a graph of its own, and its distinct tensors."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def as_placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in nodes:
            nodes[id(leaf)] = graph.placeholder(f"x{len(nodes)}")
            VALUE.put(nodes[id(leaf)], leaf)
        return nodes[id(leaf)]

    node = graph.create_node("call_function", func, *map_aggregate((args, kwargs), as_placeholder))
    return node, [VALUE.of(each) for each in node.all_input_nodes]


def _find_out(
    node: fx.Node, tensors: list[torch.Tensor], site: Site, number: int, stack: ModuleStack
) -> _Native | _Rewritten:
    fake_mode = detect_fake_mode(tensors) or FakeTensorMode()
    default, policy = preset("torch"), policy_of(number)
    with _tracing_alone(), no_dispatch_modes(), no_function_modes(), _decided():
        for each, tensor in zip(node.all_input_nodes, tensors, strict=True):
            VALUE.put(each, _fake_of(tensor, fake_mode))
        ours = _opened(node, site, Decomposer(policy, fake_mode, CompileFrame(stack)))
        try:
            theirs = _opened(node, site, Decomposer(default, fake_mode))
        except BannedOpError:
            theirs = None
        result_type = _result_type(node, ours, site, fake_mode)
    if ours is None or (theirs is not None and _effect(ours) == _effect(theirs)):
        return _Native()
    if ours.graph is None:
        return _Native(is_off=True)
    for each in ours.graph.nodes:
        each.meta.clear()  # the fake values
    float8 = {d.op: d for d in ours.decisions if d.policy is CastPolicy.FLOAT8}
    return _Rewritten(ours.graph, float8, number, result_type)


def _result_type(
    node: fx.Node, ours: Decomposed | None, site: Site, fake_mode: FakeTensorMode
) -> type:
    """Returns the class of what a call returns, where its ops return several tensors."""
    if ours is None or ours.graph is None:
        return torch.Tensor
    outputs: Any = ours.graph.output_node().args[0]
    if not isinstance(outputs, (list, tuple)):
        return torch.Tensor
    with (
        analysis(fake_mode, is_grad_enabled=site.is_grad_enabled),
        site.state.applied(),
        contextlib.suppress(Exception),  # a mixture of dtypes that only the casts make right
    ):
        return type(evaluate(node))
    return type(outputs)


@contextlib.contextmanager
def _tracing_alone() -> Iterator[None]:
    """Keeps other threads from compiling while this one traces.

    FX has one flag for all threads, which says that one of them traces; compiled functions refuse
    to be called then, unless Dynamo compiles. Relies on ``convert_frame.compile_lock`` and
    ``torch.compiler._compile_session_context``, with which Dynamo compiles.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from amp_fx.torch_private.dynamo import compile_lock, compile_session

    with compile_lock, compile_session():
        yield


def _fake_of(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """Returns a plain fake tensor with the metadata of one of any class."""
    if tensor.layout is not torch.strided:
        return tensor
    with fake_mode:
        return torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )


def _opened(node: fx.Node, site: Site, decomposer: Decomposer) -> Decomposed | None:
    """Returns what a call is decomposed into; None if it cannot be traced."""
    try:
        return decomposer.open(node, site)[0]
    except NotPlainError:
        return None


def _effect(decomposed: Decomposed) -> object:
    decisions = [(d.op, d.device_type, d.policy) for d in decomposed.decisions]
    return decisions, str(decomposed.graph)


SKIPPED = (outside_of_dynamo, _disabled_call)
"""Functions that Dynamo must not compile as frames of their own."""

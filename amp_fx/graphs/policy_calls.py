"""Runs calls of eager code under a policy, with the same results as the passes.

A call is decomposed once, on fake tensors (``decompose``), and its ops run with their casts. If the
policy and PyTorch agree on a call, the call runs unchanged under native autocast. Casts are not
cached.

Also run under native autocast, on purpose: in-place calls, calls with function arguments
(higher-order ops, hooks), nested tensors, and calls that cannot be traced.
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
from amp_fx.errors import UnsupportedError
from amp_fx.graphs.decompose import Decomposer, Decomposition, NotPlainError, call_key
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.records import AutocastSite
from amp_fx.graphs.values import analysis, evaluate, tensors_in
from amp_fx.policies.calls import TO_COPY, qualified_name
from amp_fx.policies.float8 import run_float8, weight_of, why_not_float8
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import CompileFrame, current_stack, is_linear_end
from amp_fx.regions.policy_numbers import interned, policy_of
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.registered import REGISTERED
from amp_fx.torch_private.fake_tensors import FakeTensorMode, detect_fake_mode
from amp_fx.torch_private.modes import no_dispatch_modes, no_function_modes
from amp_fx.torch_private.ops import HigherOrderOperator, OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.graphs.records import OpDecision
    from amp_fx.policies.calls import Call
    from amp_fx.policies.changes import ModuleStack
    from amp_fx.policies.policy import Policy
    from amp_fx.tables.float8 import Float8


class _ThreadState(threading.local):
    is_decided = False
    """True while a call runs that a mode has handled; outer modes ignore it."""


_state = _ThreadState()


def find_call(
    number: int, func: Any, args: tuple[Any, ...], kwargs: Any
) -> _Native | _Rewritten | None:
    """Returns a runner of a call under a policy; None if autocast does not affect the call."""
    if _state.is_decided or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None
    tensors = [t for t in tensors_in(args, kwargs) if t.is_floating_point()]
    devices = {tensor.device.type for tensor in tensors}
    is_nested = any(tensor.is_nested for tensor in tensors)
    is_enabled = any(
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        for device in devices
    )
    if is_nested or not is_enabled or _has_effects(func, args, kwargs):
        return None
    return _decided_call(number, func, args, kwargs)


_EFFECTS = ("__get__", "__set__", "__delete__", "__setitem__", "backward", "register_hook", "grad")


def _has_effects(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for calls with side effects or function arguments."""
    name = getattr(func, "__name__", "")
    if name in _EFFECTS or (name.endswith("_") and not name.endswith("__")):
        return True
    if isinstance(func, HigherOrderOperator):
        return True
    leaves: list[bool] = []
    map_aggregate((args, kwargs), lambda leaf: leaves.append(callable(leaf)))
    return any(leaves)


def outside_of_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function whose frames Dynamo must not compile. Does not import Dynamo."""
    return _disabled_call()(function, *args) if "torch._dynamo" in sys.modules else function(*args)


@functools.cache
def _disabled_call() -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    disabled: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled


@dataclasses.dataclass(frozen=True)
class _Native:
    """Runs a call unchanged."""

    is_off: bool = False
    """Whether autocast is off, because PyTorch casts for the call and the policy does not."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _handle_call(), no_autocast() if self.is_off else contextlib.nullcontext():
            return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """Runs the ops that a call was decomposed into."""

    graph: fx.Graph
    float8: dict[str, OpDecision]
    """Decisions on products that run in float8, by op."""
    settings: Float8
    result_type: type
    """Class of the result: ``torch.topk`` returns a named tuple, for example."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, tensors = _as_node(func, args, kwargs)
        env: dict[fx.Node, Any] = {}
        env.update(zip(self.graph.find_nodes(op="placeholder"), tensors, strict=True))
        with _handle_call(), no_autocast():
            for node in self.graph.nodes:
                if node.op == "call_function":
                    env[node] = self._run_node(node, env)
        result = map_arg(self.graph.output_node().args[0], env.__getitem__)
        return self.result_type(result) if isinstance(result, (list, tuple)) else result

    def _run_node(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        name = qualified_name(target) if isinstance(target, OpOverload) else ""
        decision = self.float8.get(name)
        if decision is None:
            return target(*args, **kwargs)

        def uncast(source: fx.Node) -> Any:
            return env[source.all_input_nodes[0] if source.target is TO_COPY else source]

        uncast_args, uncast_kwargs = map_arg((node.args, node.kwargs), uncast)
        call = (target, uncast_args, uncast_kwargs)
        return self._run_float8(call, (target, args, kwargs), decision)

    def _run_float8(self, call: Call, lowered: Call, decision: OpDecision) -> Any:
        """Runs a product with a weight in float8 if possible, else in the low dtype."""
        weight, has_rows = weight_of(call)
        is_end_layer = decision.origin == "table" and weight is not None and is_linear_end(weight)
        if weight is None or is_end_layer:
            return lowered[0](*lowered[1], **lowered[2])
        low_dtype = torch.get_autocast_dtype(decision.device_type)
        if why_not_float8(lowered, weight, low_dtype, self.settings, has_rows_of_outputs=has_rows):
            return lowered[0](*lowered[1], **lowered[2])
        if weight.device.type == "cpu":
            warn_of_slowness()
        return run_float8(lowered, weight, self.settings, has_rows_of_outputs=has_rows)


@contextlib.contextmanager
def _handle_call() -> Iterator[None]:
    before = _state.is_decided
    _state.is_decided = True
    try:
        yield
    finally:
        _state.is_decided = before


_calls: weakref.WeakKeyDictionary[Policy, dict[object, _Native | _Rewritten]] = (
    weakref.WeakKeyDictionary()
)
"""Runners of calls by policy. They do not refer to the policy."""
_MAX_CALLS = 10_000

_bases: weakref.WeakKeyDictionary[Policy, Policy] = weakref.WeakKeyDictionary()


def _base_of(policy: Policy) -> Policy:
    """Returns the policy without overrides for modules, which a runner's key contains.

    Policies that differ in these overrides, such as those that ``amp_fx.search`` tries, share the
    runners of other calls.
    """
    if not policy.modules:
        return policy
    if policy not in _bases:
        _bases[policy] = interned(dataclasses.replace(policy, modules=()))
    return _bases[policy]


def _decided_call(
    number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Native | _Rewritten:
    policy = policy_of(number)
    site = AutocastSite(AutocastState.ambient(), torch.is_grad_enabled())
    stack = current_stack() if policy.resolver.depends_on_module else ()
    node, tensors = _as_node(func, args, kwargs)
    # Symbols belong to one graph, so the runner is not cached.
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.size()):
        return _decompose_call(node, tensors, site, number, stack)
    calls = _calls.setdefault(_base_of(policy), {})
    stack_key = policy.resolver.stack_key(stack)
    # Registered ops are never removed, so their number shows whether one was added.
    key = call_key(node, node.all_input_nodes), site, stack_key, len(REGISTERED)
    if key not in calls:
        # A program with new shapes in every call would fill the memory.
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        calls[key] = _decompose_call(node, tensors, site, number, stack)
    return calls[key]


def _as_node(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Node, list[torch.Tensor]]:
    """Returns a call as the only node of a new graph, and its distinct tensors."""
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
    return node, [VALUE.of(placeholder) for placeholder in node.all_input_nodes]


def _decompose_call(
    node: fx.Node, tensors: list[torch.Tensor], site: AutocastSite, number: int, stack: ModuleStack
) -> _Native | _Rewritten:
    fake_mode = detect_fake_mode(tensors) or FakeTensorMode()
    default, policy = preset("torch"), policy_of(number)
    # Modes of the caller would see the ops of the traces, and this mode would rewrite them again.
    with _lock_compiler(), no_dispatch_modes(), no_function_modes(), _handle_call():
        for placeholder, tensor in zip(node.all_input_nodes, tensors, strict=True):
            VALUE.put(placeholder, _fake_of(tensor, fake_mode))
        custom = _decompose(node, site, Decomposer(policy, fake_mode, CompileFrame(stack)))
        try:
            native = _decompose(node, site, Decomposer(default, fake_mode))
        except UnsupportedError:
            native = None
        result_type = _result_type(node, custom, site, fake_mode)
    # If PyTorch makes the same casts, call the function itself: it is faster, and profilers and
    # other modes see what the program calls.
    if custom is None or (native is not None and _effect(custom) == _effect(native)):
        return _Native()
    if custom.graph is None:
        return _Native(is_off=True)
    # The metadata refers to fake tensors, and these to the fake mode of the trace.
    for op in custom.graph.nodes:
        op.meta.clear()
    float8 = {d.op: d for d in custom.decisions if d.policy is CastPolicy.FLOAT8}
    return _Rewritten(custom.graph, float8, policy.float8, result_type)


def _result_type(
    node: fx.Node, decomposed: Decomposition | None, site: AutocastSite, fake_mode: FakeTensorMode
) -> type:
    """Returns the class of a call's result; ``torch.Tensor`` if it is not a tuple or list."""
    if decomposed is None or decomposed.graph is None:
        return torch.Tensor
    outputs: Any = decomposed.graph.output_node().args[0]
    if not isinstance(outputs, (list, tuple)):
        return torch.Tensor
    with (
        analysis(fake_mode, is_grad_enabled=site.is_grad_enabled),
        site.state.applied(),
        contextlib.suppress(Exception),  # without its casts, the op may reject mixed dtypes
    ):
        return type(evaluate(node))
    return type(outputs)


@contextlib.contextmanager
def _lock_compiler() -> Iterator[None]:
    """Context in which other threads do not compile.

    FX has one global flag for tracing. While it is set, compiled functions raise an error unless
    Dynamo compiles. Relies on ``convert_frame.compile_lock`` and
    ``torch.compiler._compile_session_context``, which Dynamo uses when it compiles.
    """
    # No thread can compile before Dynamo is imported, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from amp_fx.torch_private.dynamo import compile_lock, compile_session

    with compile_lock, compile_session():
        yield


def _fake_of(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """Returns a plain fake tensor with the metadata of a tensor of any class."""
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


def _decompose(node: fx.Node, site: AutocastSite, decomposer: Decomposer) -> Decomposition | None:
    """Returns the decomposition of a call; None if it cannot be traced."""
    try:
        return decomposer.decompose(node, site)[0]
    except NotPlainError:
        return None


def _effect(decomposed: Decomposition) -> object:
    decisions = [(d.op, d.device_type, d.policy) for d in decomposed.decisions]
    return decisions, str(decomposed.graph)


SKIPPED = (outside_of_dynamo, _disabled_call)
"""Functions that Dynamo must not compile as separate frames."""

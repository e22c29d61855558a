"""Tells compiled code the policy of a region.

``PolicyMode`` is a mode because Dynamo traces modes, compares them in its guards, and enters them
again after a graph break. When Dynamo traces it, it annotates nodes with the number of the policy
(``annotated_policy``). In eager code it changes nothing, and warns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fx.errors import PolicyError, PolicyWarning
from amp_fx.graphs.bodies import argument_graphs, has_shared_body
from amp_fx.graphs.locations import is_library, lines_of, target_name
from amp_fx.graphs.metadata import CUSTOM
from amp_fx.policies.calls import is_changeable
from amp_fx.policies.changes import expand_ops
from amp_fx.policies.policy import preset
from amp_fx.regions.policy_numbers import number_of, pin, policy_of
from amp_fx.torch_private.modes import function_modes
from amp_fx.torch_private.ops import HigherOrderOperator
from amp_fx.torch_private.tracing import TracingContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

    from amp_fx.policies.policy import Policy

_ANNOTATION = "amp_fx_policy_"


class PolicyMode(TorchFunctionMode):
    """Mode that marks code with a policy. If modes are nested, the innermost one wins.

    Does not override ``__enter__``, so that Dynamo can break a graph inside the mode.

    Args:
        number: The number of the policy, which the caller must hold a reference to.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function: annotated if Dynamo traces it, else unchanged."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            with torch.fx.traceback.annotate({f"{_ANNOTATION}{self.number}": True}):
                # The method calls ``super()``, which breaks the graph.
                if func is torch.Tensor.unflatten:
                    return torch.unflatten(*args, **kwargs)
                return func(*args, **kwargs)
        if _is_ignored(self.number, func, args):
            _warn_of_eager_code()
        return func(*args, **kwargs)


def _is_ignored(number: int, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Returns True if an eager call is under autocast and the policy differs for its op.

    Graphs that amp_fx compiled run with autocast off.
    """
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    if tensor is None or not tensor.is_floating_point() or torch.compiler.is_exporting():
        return False
    device_type = tensor.device.type
    if not torch.amp.is_autocast_available(device_type):
        return False
    name = getattr(func, "__name__", "").strip("_")
    return torch.is_autocast_enabled(device_type) and _differs(number, name, device_type)


@functools.lru_cache(maxsize=4096)
def _differs(number: int, name: str, device_type: str) -> bool:
    """Returns True if a policy may treat an op otherwise than PyTorch's policy."""
    policy = policy_of(number)
    try:
        ops = expand_ops(name)
    except PolicyError:
        return False
    if policy.modules and any(map(is_changeable, ops)):
        return True
    table, default = (each.tables.get(device_type, {}) for each in (policy, preset("torch")))
    has_arguments = any(op in override.overloads for override in policy.args for op in ops)
    return has_arguments or any(table.get(op) != default.get(op) for op in ops)


_warned: set[tuple[str, str]] = set()


def _warn_of_eager_code() -> None:
    """Warns once for each function that runs eagerly in a region with a policy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_code.co_name
    if place in _warned:
        return
    _warned.add(place)
    warnings.warn(
        f"{place[1]!r} ({place[0]}:{frame.f_lineno}) runs eagerly in a region with a policy: "
        "policies apply to compiled code only, and eager code follows torch.autocast",
        PolicyWarning,
        stacklevel=3,
    )


def warn_of_policy(
    gm: fx.GraphModule, nodes: list[fx.Node], policy: Policy, device_types: tuple[str, ...]
) -> None:
    """Warns of opaque nodes if a policy differs for an op in them: it does not reach them."""
    number = pin(policy)
    bodies = [body.graph.nodes for node in nodes for body in argument_graphs(gm, node)]
    inside = itertools.chain(nodes, *bodies)
    targets = {str(getattr(node.target, "__name__", node.target)) for node in inside}
    names = {target.partition(".")[0] for target in targets}
    if any(_differs(number, name, kind) for name in names for kind in device_types):
        lines = [line for line in lines_of(nodes[0]) if not is_library(line.file)]
        place = f"{lines[-1].file}:{lines[-1].number}: {lines[-1].code}" if lines else "?"
        warnings.warn(
            f"{target_name(nodes[0])} ({place}) follows torch.autocast: the policy does not reach "
            "inside",
            PolicyWarning,
            stacklevel=2,
        )


def annotated_policy(gm: fx.GraphModule, node: fx.Node) -> Policy | None:
    """Returns the policy of the innermost mode around a captured node; None if there is none."""
    nodes = [node]
    # Dynamo annotates the nodes in the bodies of a higher-order op, but not the op itself. It
    # annotates ``invoke_subgraph``, whose body is annotated for the first of its calls.
    if isinstance(node.target, HigherOrderOperator) and not has_shared_body(node):
        for body in argument_graphs(gm, node):
            nodes += body.graph.nodes
    for annotated in nodes:
        for name in filter(is_policy_annotation, CUSTOM.get(annotated) or ()):
            return policy_of(int(name.removeprefix(_ANNOTATION)))  # of the innermost mode
    return None


def is_policy_annotation(name: object) -> bool:
    """Returns True if a key of ``CUSTOM`` is the annotation of a ``PolicyMode``."""
    return str(name).startswith(_ANNOTATION)


def ambient_policy() -> Policy | None:
    """Returns the policy of the calling thread's innermost region with a policy, or None."""
    stack = function_modes()
    if not stack and TracingContext.try_get() is not None:
        # While this thread compiles, Dynamo clears the stack of modes.
        from amp_fx.torch_private.dynamo import captured_function_modes

        stack = captured_function_modes()
    modes = [mode for mode in stack if isinstance(mode, PolicyMode)]
    return policy_of(modes[-1].number) if modes else None


@contextlib.contextmanager
def use_policy(policy: Policy | None) -> Iterator[None]:
    """Context in a region with an interned policy; None changes nothing."""
    with contextlib.nullcontext() if policy is None else PolicyMode(number_of(policy)):
        yield


SKIPPED = (
    PolicyMode.__torch_function__,
    ambient_policy,
    use_policy,
    _is_ignored,
    _differs,
    _warn_of_eager_code,
)
"""Functions that Dynamo must not compile as separate frames."""

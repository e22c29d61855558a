"""Applies a policy of the user's own in eager code, and in what Dynamo captures.

``PolicyMode`` gets each call of a torch function. In eager code it treats the call as the passes
treat a node (``policy_calls``). Dynamo traces the mode, too: there the mode only annotates the
nodes with the number of the policy (``annotated_policy``), and Dynamo's guards compare that number.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import binary_cross_entropy
from torch.overrides import TorchFunctionMode

from amp_fx.graphs.bodies import argument_graphs
from amp_fx.graphs.policy_calls import find_call, outside_of_dynamo
from amp_fx.regions.policy_numbers import number_of, policy_of
from amp_fx.regions.state import left_on_error
from amp_fx.torch_private.modes import function_modes
from amp_fx.torch_private.tracing import TracingContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.policies.policy import Policy

_ANNOTATION = "amp_fx_policy_"


class PolicyMode(TorchFunctionMode):
    """Applies a policy to the calls inside it; of nested ones, the innermost.

    It has no ``__enter__`` of its own: Dynamo can then break a graph inside it.

    Args:
        number: The number of the policy, which must stay alive.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function as the policy demands."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            with torch.fx.traceback.annotate({f"{_ANNOTATION}{self.number}": True}):
                if func is binary_cross_entropy and args[0].device.type != "cpu":
                    torch._dynamo.graph_break()  # PyTorch may ban it, and the policy allow it
                if func is torch.Tensor.unflatten:  # it calls super(), at which Dynamo breaks
                    return torch.unflatten(*args, **kwargs)
                return func(*args, **kwargs)
        call = outside_of_dynamo(find_call, self.number, func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        return outside_of_dynamo(call, func, args, kwargs)


def annotated_policy(gm: fx.GraphModule, node: fx.Node) -> Policy | None:
    """Returns the policy of the innermost mode in which Dynamo captured a node; None without any.

    Dynamo does not annotate a node of a higher-order op, but the nodes of its bodies.
    """
    nodes = [node, *(n for body in argument_graphs(gm, node) for n in body.graph.nodes)]
    names = [str(name) for each in nodes for name in each.meta.get("custom") or ()]
    numbers = [n.removeprefix(_ANNOTATION) for n in names if n.startswith(_ANNOTATION)]
    return policy_of(int(numbers[0])) if numbers else None  # the innermost mode annotates first


def ambient_policy() -> Policy | None:
    """Returns the policy of the innermost region of the calling thread that has one.

    Dynamo empties the stack of modes while it compiles.
    """
    stack = function_modes()
    if not stack and TracingContext.try_get() is not None:  # this thread compiles
        from amp_fx.torch_private.dynamo import captured_function_modes

        stack = captured_function_modes()
    modes = [mode for mode in stack if isinstance(mode, PolicyMode)]
    return policy_of(modes[-1].number) if modes else None


def enter_policy(number: int) -> PolicyMode:
    """Enters the mode of a policy, as a node of a graph that runs an island."""
    mode = PolicyMode(number)
    mode.__enter__()  # type: ignore[no-untyped-call]
    return mode


def exit_policy(mode: PolicyMode) -> None:
    """Exits the mode that ``enter_policy`` entered."""
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def markers_left_on_error() -> Iterator[None]:
    """Leaves the regions and modes that an exception has kept markers of a graph from leaving."""
    depth = len(function_modes())
    try:
        with left_on_error():
            yield
    except BaseException:
        for mode in reversed(function_modes()[depth:]):
            mode.__exit__(None, None, None)
        raise


@contextlib.contextmanager
def policy_applied(policy: Policy | None) -> Iterator[None]:
    """Applies an interned policy to the calls inside it; None changes nothing."""
    with contextlib.nullcontext() if policy is None else PolicyMode(number_of(policy)):
        yield


SKIPPED = (PolicyMode.__torch_function__, ambient_policy, policy_applied)
"""Functions that Dynamo must not compile as frames of their own."""

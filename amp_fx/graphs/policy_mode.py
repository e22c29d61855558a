"""Applies custom policies in eager code and in code that Dynamo captures.

``PolicyMode`` intercepts each call of a torch function. In eager code, it treats the call as the
passes treat a node (``policy_calls``). When Dynamo traces the mode, the mode only annotates nodes
with the number of the policy (``annotated_policy``), and Dynamo's guards compare that number.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import binary_cross_entropy
from torch.overrides import TorchFunctionMode

from amp_fx.graphs.bodies import argument_graphs, has_shared_body
from amp_fx.graphs.metadata import CUSTOM
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
    """Mode that applies a policy. If modes are nested, the innermost one wins.

    Does not override ``__enter__``, so that Dynamo can break a graph inside the mode.

    Args:
        number: The number of the policy, which the caller must hold a reference to.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function under the policy."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            with torch.fx.traceback.annotate({f"{_ANNOTATION}{self.number}": True}):
                # Autocast bans the op, and Dynamo raises the ban as an error of the program. The
                # policy may allow it, so eager code calls the op.
                if func is binary_cross_entropy and args[0].device.type != "cpu":
                    torch._dynamo.graph_break()
                # The method calls ``super()``, which breaks the graph.
                if func is torch.Tensor.unflatten:
                    return torch.unflatten(*args, **kwargs)
                return func(*args, **kwargs)
        call = outside_of_dynamo(find_call, self.number, func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        return outside_of_dynamo(call, func, args, kwargs)


def annotated_policy(gm: fx.GraphModule, node: fx.Node) -> Policy | None:
    """Returns the policy of the innermost mode around a captured node; None if there is none."""
    nodes = [node]
    # Dynamo annotates the nodes in the bodies of a higher-order op, but not the op itself. It
    # annotates ``invoke_subgraph``, whose body is annotated for the first of its calls.
    if not has_shared_body(node):
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


def enter_policy(number: int) -> PolicyMode:
    """Enters the mode of a policy; a node before an opaque node calls this function."""
    mode = PolicyMode(number)
    mode.__enter__()  # type: ignore[no-untyped-call]
    return mode


def exit_policy(mode: PolicyMode) -> None:
    """Exits the mode that ``enter_policy`` entered."""
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def markers_left_on_error() -> Iterator[None]:
    """Context that exits the regions and modes of a graph if an exception skips its markers."""
    depth = len(function_modes())
    try:
        with left_on_error():
            yield
    except BaseException:
        # The markers that exit these modes are after the node that failed.
        for mode in reversed(function_modes()[depth:]):
            mode.__exit__(None, None, None)
        raise


@contextlib.contextmanager
def policy_applied(policy: Policy | None) -> Iterator[None]:
    """Context that applies an interned policy; None changes nothing."""
    with contextlib.nullcontext() if policy is None else PolicyMode(number_of(policy)):
        yield


SKIPPED = (PolicyMode.__torch_function__, ambient_policy, policy_applied)
"""Functions that Dynamo must not compile as separate frames."""

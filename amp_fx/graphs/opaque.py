"""Evaluates opaque nodes: nodes that no pass rewrites and that run under native autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_aggregate, map_arg

from amp_fx.graphs.metadata import CAPTURED, OPAQUE, SITE, VALUE
from amp_fx.graphs.mixtures import lacks_low_kernel
from amp_fx.graphs.sizes import hint, num_elements
from amp_fx.graphs.values import (
    adopt_captured,
    analysis,
    argument_values,
    call_on_fakes,
    set_value,
    tensors_in,
)
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private.autograd import (
    enter_dual_level,
    exit_dual_level,
    restore_functorch_levels,
)
from amp_fx.torch_private.modes import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.torch_private.fake_tensors import FakeTensorMode
    from amp_fx.torch_private.ops import OpOverload

TRANSFORM = "torch.func transform"
"""Value of ``metadata.OPAQUE`` for nodes inside a torch.func transform or a forward-mode AD level.
"""


def is_bare_function(node: fx.Node) -> bool:
    """Returns True if a node is a ``torch.autograd.Function`` outside of the program's regions.

    Dynamo captured its forward and backward for the program's dtypes, and ``torch.amp.custom_fwd``
    was a no-op. The function therefore runs without autocast.
    """
    is_function = getattr(node.target, "__name__", "") == "autograd_function_apply"
    return is_function and SITE.of(node).is_bare


def iterate_steps(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the nodes in order, one by one or as the list of nodes of one transform."""
    transform: list[fx.Node] = []
    for node in list(graph.nodes):
        # The rewrite of a node may erase later ones, such as the items of its tuple.
        if node._erased:
            continue
        if OPAQUE.get(node) == TRANSFORM:
            transform.append(node)
            continue
        if transform:
            yield transform
            transform = []
        yield [node]


def evaluate_opaque(node: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    """Evaluates an opaque node under native autocast and records its value."""
    args, kwargs = argument_values(node)
    captured = CAPTURED.get(node)
    # Without tensors, autocast changes nothing, and the call may have effects.
    if not tensors_in(args, kwargs):
        set_value(node, captured)
        return
    with native_autocast(node, fake_mode):
        set_value(node, adopt_captured(captured, call_on_fakes(node, args, kwargs)))


def evaluate_together(
    nodes: list[fx.Node], fake_mode: FakeTensorMode | None, recorder: MixtureRecorder | None = None
) -> None:
    """Evaluates the nodes of one transform and records the values of its results.

    Values inside the transform are wrapped or dual tensors, which must not outlive it. For their
    nodes, the captured values are recorded.
    """
    values: dict[fx.Node, Any] = {}
    with (
        native_autocast(nodes[0], fake_mode),
        recorder or contextlib.nullcontext(),
        restore_functorch_levels(),
        contextlib.ExitStack() as dual_level,
    ):
        for node in nodes:
            arguments = node.args, node.kwargs
            args, kwargs = map_arg(arguments, lambda n: values.get(n, VALUE.get(n)))
            values[node] = call_on_fakes(node, args, kwargs)
            if node.target is enter_dual_level:
                # The level is global to all threads. If an error leaves it open, no other code
                # can exit it.
                dual_level.callback(exit_dual_level, level=values[node])
            elif node.target is exit_dual_level:
                dual_level.pop_all()
    for node in nodes:
        is_result = not set(node.users).issubset(nodes)
        set_value(node, values[node] if is_result else CAPTURED.get(node))


class RejectedTransformError(Exception):
    """A transform would raise under an autocast that the program does not ask for."""


class MixtureRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops of ATen whose real kernels may reject the dtypes that they get."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an op."""
        kwargs = kwargs or {}
        dtypes = {t.dtype for t in tensors_in(args, kwargs) if t.is_floating_point()}
        is_suspect = len(dtypes) > 1 or lacks_low_kernel(func, args, kwargs)
        if is_suspect and func.namespace == "aten":
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def rejection(self) -> str:
        """Returns the error of the first real kernel that rejects its dtypes, or ``""``.

        Fake kernels accept more. The real kernels run on zeros. Large calls are not tried.
        """
        for func, args, kwargs in self.calls:
            if sum(map(num_elements, tensors_in(args, kwargs))) > _MAX_ELEMENTS:
                continue
            # Whether a kernel accepts dtypes does not depend on values.
            given, options = map_aggregate((args, kwargs), _zeros_like)
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad(), no_autocast():
                    func(*given, **options)
            except RuntimeError as error:
                return f"{func}: {error}".splitlines()[0]
        return ""


_MAX_ELEMENTS = 2**22
"""Maximum number of elements to try an op with: 16 MB of zeros."""


def _zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros([hint(size) for size in value.size()], dtype=value.dtype)
    return hint(value)


@contextlib.contextmanager
def native_autocast(node: fx.Node, fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Context with fake tensors and the autocast state and grad mode of a node's site."""
    site = SITE.of(node)
    with analysis(fake_mode, is_grad_enabled=site.is_grad_enabled), site.state.applied():
        yield

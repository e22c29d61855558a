"""Compiles graphs with the autocast state in which eager code would run their backward.

The forward is traced with autocast off, because its casts are nodes. Eager code runs the backward
in the autocast state of the call of ``backward()``:

- autocast is off if the call is outside of the region, as PyTorch recommends;
- the region is active if the compiled function itself calls ``backward()``: Dynamo ends the graph
  at the call.

A backward that multiplies values of several dtypes is also traced in the region. An example is a
float32 gradient and a bfloat16 tensor that a ``torch.autograd.Function`` saved. Eager code fails
there with autocast off; ``torch.compile`` works, because it traces every backward in the region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.fallback import with_autocast_off
from amp_fx.backend.inner import compile_inner
from amp_fx.graphs.bodies import copy_graph_module, graphs_in
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.regions.module_stack import ends_at_backward
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.torch_private.inductor_passes import CustomGraphPass, get_hash_for_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options

    Compiled = Callable[..., Any]

aten = torch.ops.aten

_PRODUCTS = (
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.mm.default,
    aten.mv.default,
)
"""Ops whose kernels require inputs of one dtype, while their fake kernels accept several."""


class MixedDtypesError(Exception):
    """A product of a joint graph has inputs of several floating-point dtypes."""


class RefuseMixedDtypes(CustomGraphPass):
    """Raises if a product of a joint graph has inputs of several floating-point dtypes.

    Args:
        following: The user's ``joint_custom_pre_pass``, which runs after this pass.
    """

    def __init__(self, following: Any = None) -> None:
        self.following = following

    def __call__(self, graph: fx.Graph) -> None:
        """Checks a graph of a forward and its backward.

        Raises:
            MixedDtypesError: A product has inputs of several dtypes.
        """
        assert graph.owning_module is not None
        for node in [node for each in graphs_in(graph.owning_module) for node in each.nodes]:
            if node.target in _PRODUCTS and len(_floating_dtypes(node)) > 1:
                raise MixedDtypesError(f"{node.format_node()} has inputs of several dtypes")
        if self.following is not None:
            self.following(graph)

    def uuid(self) -> Any:
        """Returns a key for inductor's caches; None if the user's pass has none."""
        own = get_hash_for_files((__file__,))
        if self.following is None:
            return own
        theirs = self.following.uuid() if isinstance(self.following, CustomGraphPass) else None
        return None if theirs is None else (own, theirs)


def _floating_dtypes(node: fx.Node) -> set[torch.dtype]:
    return {t.dtype for t in tensors_in(*argument_values(node)) if t.is_floating_point()}


def compile_with_backward(
    state: AutocastState,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None,
) -> Compiled:
    """Compiles a rewritten graph and its backward.

    Args:
        state: The autocast state at the beginning of the graph.
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        cache: See ``compile_inner``.
    """
    has_backward = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    )
    given = (example_inputs, options, cache)
    if not has_backward or not state.enabled or not options.uses_aot_autograd:
        with no_autocast():
            return compile_inner(gm, *given)
    if AutocastState.ambient().enabled and ends_at_backward():
        return _compile_in(state, gm, *given)
    try:
        with no_autocast():
            return compile_inner(copy_graph_module(gm), *given, joint_pass=RefuseMixedDtypes)
    except MixedDtypesError:
        return _compile_in(state, gm, *given)


def _compile_in(state: AutocastState, gm: fx.GraphModule, *args: Any) -> Compiled:
    """Compiles a rewritten graph whose backward is traced in an autocast state."""
    inline_shared_bodies(gm)  # torch would reuse bodies that it traced in another state
    with state.applied():
        return compile_inner(with_autocast_off(gm, state), *args)

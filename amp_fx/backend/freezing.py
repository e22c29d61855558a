"""Freezes graphs without gradients: all that is computed from weights alone is kept.

``torch._inductor.config.freezing`` does that too, and goes on with the old numbers after a
weight was written. Here every value has a recipe, and is made again before the first call
after a write (``amp_fx.weights.kept_call``). Next to the frozen graph stands the one that
casts: it is compiled and called where weights turn out to change on every call.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_fx.backend.inner import (
    after_autograd,
    compile_graph,
    compile_with_inductor,
    inductor_config,
    is_strict,
    uses_inductor,
)
from amp_fx.graphs.metadata import SITE
from amp_fx.graphs.places import input_path
from amp_fx.graphs.values import is_written, tensors_in, value_of
from amp_fx.weights.engine import engine, has_hook
from amp_fx.weights.freeze import CannotFreezeError, compile_frozen, folded
from amp_fx.weights.kept_call import FrozenCall
from amp_fx.weights.kept_inputs import keepable_weights
from amp_fx.weights.store import STORE, making_values
from amp_fx.weights.stored_low import stored_tensors
from amp_fx.weights.variants import is_dynamic
from amp_fx.weights.write_signals import is_watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.options import Options
    from amp_fx.weights.freeze import FrozenGraph
    from amp_fx.weights.recipes import Recipe

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.freezing")


def is_wanted(options: Options, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph with such inputs, which inductor compiles, is to be frozen.

    Graphs without gradients on the CPU are, unless ``freezing`` or ``weight_cache`` is off; on an
    accelerator (``ACCELERATORS``) where that is asked for.
    """
    tensors = tensors_in(example_inputs)
    has_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_off = options.freezing is False or not options.weight_cache
    if is_off or has_gradients or not has_hook():
        return False
    device_type = _device_type_of(tensors)
    if device_type in ACCELERATORS:
        return _is_asked_for(options) and not _is_any_on(options, _HOLDING_ON_ACCELERATORS)
    return device_type == "cpu" and not _is_any_on(options, _HOLDING)


ACCELERATORS = ("cuda", "xpu")
"""Devices for which inductor compiles with Triton, and every write to a weight is noticed."""

_HOLDING = ("max_autotune", "max_autotune_gemm", "cpp_wrapper")
"""Settings of inductor under which its code holds weights in forms that no graph shows."""

_HOLDING_ON_ACCELERATORS = (*_HOLDING, "triton.cudagraphs")
"""A recorded graph goes on reading the addresses of the values that it was recorded with."""


def _device_type_of(tensors: Sequence[torch.Tensor]) -> str | None:
    """The type of the only device of a graph, numbers on the CPU aside; None for several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices = {t.device for t in tensors if t.device.type != "cpu" or t.dim() > 0}
    return devices.pop().type if len(devices) == 1 else "cpu" if not devices else None


def _is_asked_for(options: Options) -> bool:
    """Whether a user wants weights frozen, here or by inductor's own switch."""
    return options.freezing is True or _is_any_on(options, ("freezing",))


def _is_any_on(options: Options, names: Sequence[str]) -> bool:
    """Whether any of some settings of inductor is on where a graph is compiled."""
    from torch._inductor import config

    given = inductor_config(options)
    return any(given.get(name, operator.attrgetter(name)(config)) for name in names)


def compile_freezing(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, str],
    options: Options,
    *,
    owner: str,
    verify: str,
    may_give_up: bool,
) -> Compiled:
    """Compiles a rewritten graph with its weights frozen.

    Raises:
        CannotFreezeError: There is nothing to gain, or no way to do it.
    """
    current = {i: example_inputs[i] for i in weights}
    aliases = constants_for(example_inputs, weights)
    started = STORE.start(tuple(current.values()))
    num_inputs = len(example_inputs)

    def compile_inside(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        _check_alike(graph, aliases, num_inputs)
        after_autograd(options).widen_products(graph.graph)
        with _plain_epilogues(options):
            frozen, made = compile_frozen(
                graph,
                inputs,
                aliases,
                compile_graph,
                folds_batch_norm=options.fold_batch_norm,
                **kwargs,
            )
        call = new_call(frozen, weights, owner=owner, verify=verify, may_give_up=may_give_up)
        if started is not None:
            with unset_fake_temporarily():
                call.adopt([made[v.recipe] for v in frozen.values(weights)], started, current)
        return call

    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):  # it would skip freezing
            return compile_with_inductor(gm, example_inputs, options, compile_inside)
    finally:
        current.clear()  # what is compiled must not hold the weights
        aliases.clear()


def _plain_epilogues(options: Options) -> AbstractContextManager[None]:
    """Keeps what follows a product out of oneDNN's kernels, which round at the end only.

    Relies on inductor's lowering patterns being under ``pattern_matcher``, and on the passes of
    its freezing not being.
    """
    from torch._inductor import config

    if not is_strict(options):
        return contextlib.nullcontext()
    patch: AbstractContextManager[None] = config.patch(pattern_matcher=False)
    return patch


def constants_for(example_inputs: Sequence[Any], weights: Iterable[int]) -> dict[int, torch.Tensor]:
    """Returns aliases of weights to freeze: their bytes, in storages of their own."""
    with making_values():
        return {i: engine().alias(example_inputs[i].detach()) for i in weights}


def new_call(frozen: FrozenGraph, names: Mapping[int, str], **settings: Any) -> FrozenCall:
    """Creates the ``FrozenCall`` that calls a frozen graph."""
    return FrozenCall(
        frozen.values(names),
        frozen.taken,
        bind=frozen.bind,
        handed_out=frozen.handed_out,
        **settings,
    )


def values_when_frozen(
    gm: fx.GraphModule, example_inputs: Sequence[Any], weights: Sequence[int], options: Options
) -> dict[Recipe, torch.Tensor]:
    """Lists what a frozen graph would keep; computes and compiles nothing.

    Returns:
        Fake tensors by the recipes of what they stand for; views of weights are left out.
    """
    found: dict[Recipe, torch.Tensor] = {}

    def note(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        fakes = {i: inputs[i] for i in weights}
        _check_alike(graph, fakes, len(example_inputs))
        after_autograd(options).widen_products(graph.graph)
        values = folded(graph, inputs, fakes, folds_batch_norm=options.fold_batch_norm)
        storages = {fake.untyped_storage()._cdata for fake in fakes.values()}
        found.update(
            {r: v for r, v in values.items() if v.untyped_storage()._cdata not in storages}
        )
        return make_boxed_func(graph.forward)

    with torch._functorch.config.patch(enable_autograd_cache=False):
        compile_with_inductor(gm, example_inputs, options, note)
    return found


def _check_alike(
    graph: fx.GraphModule, weights: Mapping[int, torch.Tensor], num_inputs: int
) -> None:
    """Checks that a graph of AOTAutograd has the inputs of ours, in their order.

    Raises:
        CannotFreezeError: It has others, as with subclasses or states of random numbers.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    if len(placeholders) != num_inputs:
        raise CannotFreezeError("AOTAutograd changed the inputs")
    for i, weight in weights.items():
        value = placeholders[i].meta["val"]
        if (value.dtype, tuple(value.shape)) != (weight.dtype, tuple(weight.shape)):
            raise CannotFreezeError("AOTAutograd moved the inputs")


def weights_to_freeze(
    captured: fx.GraphModule,
    found: Rewritten,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    plain: Sequence[Any] | None = None,
) -> dict[int, str]:
    """The inputs that are to be frozen, with their names; none where the graph is not to be.

    Weights that were stored low to save memory are not, unless freezing is asked for; nor are
    those of a graph in which autocast is off throughout.
    """
    if not uses_inductor(example_inputs, options) or not is_wanted(options, example_inputs):
        return {}
    if not _is_on(found.cast.graph):
        return {}
    stored = set() if options.freezing else stored_tensors(found.frame.modules())
    weights = frozen_weights(captured, found.cast, example_inputs if plain is None else plain)
    return {i: name for i, name in weights.items() if id(example_inputs[i]) not in stored}


def _is_on(graph: fx.Graph) -> bool:
    """Whether autocast is on anywhere in a graph."""
    ops = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return any(SITE.is_on(node) and SITE.of(node).state.enabled for node in ops)


def frozen_weights(
    captured: fx.GraphModule, rewritten: fx.GraphModule, example_inputs: Sequence[Any]
) -> dict[int, str]:
    """The inputs that can be frozen, with their names: weights that the graph does not write."""
    placeholders = rewritten.graph.find_nodes(op="placeholder")[: len(example_inputs)]
    written = {node.name for node in placeholders if is_written(node)}
    position = {node.name: i for i, node in enumerate(placeholders)}
    found = {}
    for name, sharing in keepable_weights(captured, example_inputs):
        i = position[name]
        others = [example_inputs[position[other]] for other in sharing if other != name]
        is_alone = not any(_are_one(example_inputs[i], other) for other in others)
        is_seen = is_watchable(example_inputs[i]) or example_inputs[i].is_meta  # a stand-in
        is_kept = is_alone and written.isdisjoint(sharing) and is_seen
        if is_kept and not is_dynamic(value_of(placeholders[i])):
            found[i] = input_path(placeholders[i])
    return found


def _are_one(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors begin with the same bytes: inductor may take them for one constant."""
    return left.data_ptr() == right.data_ptr()

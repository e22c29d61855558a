"""Lays kept copies of convolution weights out as inductor's convolutions take them.

Before:
    %kept   = placeholder[weight_bfloat16_kept]
    %weight = amp_fx.kept_cast(%l_weight, %kept)
    %y      = aten.conv2d(%x, %weight)
After, where inductor will run the convolutions of the graph channels-last:
    %kept   = placeholder[weight_bfloat16_kept]        # channels-last
    %laid   = amp_fx.laid_out_as_before(%kept)
    %weight = amp_fx.kept_cast(%l_weight, %laid)
    %y      = aten.conv2d(%x, %weight)

A contiguous copy would be laid out again on every call, forward and backward. Whoever looks at
strides sees those of before: ``amp_fx::laid_out_as_before`` returns a contiguous tensor, so
that no output of the graph and no view in it changes. Inductor lowers it to nothing, and the
convolutions find what they want in place. Left alone on purpose: copies with any other use,
weights that their user has laid out, and those for which both layouts are one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.dtypes import is_spread
from amp_fx.graphs.metadata import CAPTURED, KEPT_INPUT, SITE, VALUE
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    call_target,
    detect_fake_mode,
    set_value,
    tensors_in,
    value_of,
)
from amp_fx.weights.kept_cast import kept_cast, laid_out_as_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode


log = logging.getLogger(__name__)


def lay_out_kept_copies(gm: fx.GraphModule, config: Mapping[str, Any]) -> int:
    """Keeps the copies that only convolutions use channels-last, if inductor wants that.

    Returns:
        How many copies that are.
    """
    kept = [node for node in gm.graph.find_nodes(op="placeholder") if _is_convertible(node)]
    if not kept or not _runs_channels_last(gm.graph, config):
        return 0
    _teach_inductor()
    fake_mode = detect_fake_mode(gm.graph)
    for node in kept:
        _lay_out(gm.graph, node, fake_mode)
    gm.recompile()
    return len(kept)


def _is_convertible(node: fx.Node) -> bool:
    slot = KEPT_INPUT.get(node)
    if slot is None or slot.is_alias or value_of(node).dim() != 4:
        return False
    value = value_of(node)
    if is_spread(value):
        return False
    if not value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last):
        return False
    return all(_is_weight_of_convolution(reader, use) for use, reader in _uses(node))


def _uses(kept: fx.Node) -> Iterable[tuple[fx.Node, fx.Node]]:
    """Who reads a kept copy, through the casts that stand for it: what is read, and by whom."""
    for user in kept.users:
        if user.target is kept_cast:
            yield from ((user, reader) for reader in user.users)
        else:
            yield kept, user


def _is_weight_of_convolution(node: fx.Node, weight: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_convolution(node):
        return False
    others = [arg for i, arg in enumerate(node.args) if i != 1]
    return node.args[1] is weight and weight not in others and not node.kwargs


def is_convolution(node: fx.Node) -> bool:
    """Whether a node calls one of PyTorch's convolutions, in whatever dialect."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and _CONVOLUTION.match(name) is not None


_CONVOLUTION = re.compile(r"_?conv(olution|(_transpose)?[123]d)(\.\w+)?$")


def _lay_out(graph: fx.Graph, kept: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    before = value_of(kept)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        laid = graph.call_function(laid_out_as_before, ())
    kept.replace_all_uses_with(laid)
    laid.args = (kept,)
    set_value(laid, before)
    SITE.put(laid, SITE.of(kept))
    with analysis(fake_mode, is_grad_enabled=False):
        set_value(kept, torch.empty_like(before, memory_format=torch.channels_last))
    CAPTURED.put(kept, value_of(kept))
    slot = KEPT_INPUT.of(kept)
    KEPT_INPUT.put(kept, dataclasses.replace(slot, memory_format=torch.channels_last))


@functools.cache
def _teach_inductor() -> None:
    """Registers the lowering of the op: nothing, as strides of inductor's buffers are its own.

    Relies on ``torch._inductor.lowering.register_lowering``.
    """
    from torch._inductor.lowering import register_lowering

    @register_lowering(laid_out_as_before, type_promotion_kind=None)
    def lower(low: Any) -> Any:
        return low


def _runs_channels_last(graph: fx.Graph, config: Mapping[str, Any]) -> bool:
    found = convolutions(graph)
    values = [value_of(node) for node in graph.find_nodes(op="placeholder")]
    is_training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(values))
    return prefers_channels_last(
        found, num_nodes=len(graph.nodes), is_inference=not is_training, config=config
    )


def convolutions(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The arguments of every ``aten::convolution`` that a graph will make, tensors fake."""
    recorder = _Recorder()
    with analysis(detect_fake_mode(graph), is_grad_enabled=False), recorder:
        for node in graph.nodes:
            if is_convolution(node):
                args, kwargs = argument_values(node)
                call_target(node, args, kwargs)
    return recorder.found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


def prefers_channels_last(
    found: Sequence[tuple[Any, ...]],
    *,
    num_nodes: int,
    is_inference: bool,
    config: Mapping[str, Any],
) -> bool:
    """Whether inductor will run the convolutions of a graph channels-last.

    A wrong answer costs a copy per call and convolution, and no more. Relies on
    ``GraphLowering.decide_layout_opt``, a function of the convolutions, the number of nodes and
    the settings; where it cannot be asked, the answer is no.

    Args:
        found: The arguments of the convolutions (``convolutions``).
        num_nodes: How many nodes the graph has, at least.
        is_inference: Whether no gradient flows.
        config: The settings of inductor that the graph will be compiled with.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.graph import GraphLowering

    with inductor_config.patch(dict(config)):
        if not found:
            return False
        stand_in = _stand_in(found, num_nodes)
        try:
            return bool(GraphLowering.decide_layout_opt(stand_in, is_inference=is_inference))
        except (AttributeError, TypeError):
            log.debug("inductor cannot be asked for layouts", exc_info=True)
            return False


def _stand_in(found: Sequence[tuple[Any, ...]], num_nodes: int) -> fx.GraphModule:
    """A graph with nothing but the convolutions, and as many nodes as are asked for."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        VALUE.put(node, value)
        return node

    inputs = [map_aggregate(args, placeholder) for args in found]
    for args in inputs:
        graph.call_function(torch.ops.aten.convolution.default, args)
    for _ in range(num_nodes - len(graph.nodes)):
        graph.call_function(torch.ops.aten.detach.default, inputs[0][:1])
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)

"""Inlines the autocast and grad mode regions of an exported program.

Before:
    %body = get_attr[submod_1]
    %out  = higher_order.wrap_with_autocast("cpu", torch.bfloat16, True, False, %body, %x, %w)
    %y    = getitem(%out, 0)
After:
    %enter = _enter_autocast("cpu", torch.bfloat16, True, False)
    %y     = aten.linear(%x, %w)
    %exit  = _exit_autocast(%enter)

``torch.export`` represents regions as higher-order ops. The pass restores the markers of Dynamo's
graphs, which ``mark_regions`` reads. Grad mode regions get none: an exported program is for
inference.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.graphs.bodies import bodies_of, has_plain_bodies
from amp_fx.graphs.metadata import CAPTURED, VALUE
from amp_fx.graphs.values import remember_captured
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.autocast import enter_autocast, exit_autocast

_hop = torch.ops.higher_order
_NUM_SETTINGS: dict[Any, int] = {_hop.wrap_with_autocast: 4, _hop.wrap_with_set_grad_enabled: 1}
"""Number of arguments of a region, which precede its body."""


@dataclasses.dataclass(frozen=True)
class InlineRegions:
    """Inlines all regions, also nested ones and those in bodies of ``cond``."""

    name: ClassVar[str] = "inline_regions"
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``regions_inlined``."""
        return PassResult(Counter(regions_inlined=_inline_all(gm)))


def _inline_all(gm: fx.GraphModule) -> int:
    num_inlined = 0
    while True:
        regions = [node for node in gm.graph.nodes if node.target in _NUM_SETTINGS]
        if not regions:
            break
        for node in regions:
            _inline(gm, node)
        num_inlined += len(regions)
    _move_captured(gm.graph)
    for node in list(gm.graph.nodes):
        if has_plain_bodies(node):
            num_inlined += sum(map(_inline_all, bodies_of(gm, node)))
    return num_inlined


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    num_settings = _NUM_SETTINGS[node.target]
    settings, body_node = node.args[:num_settings], node.args[num_settings]
    assert isinstance(body_node, fx.Node)
    body = gm.get_submodule(str(body_node.target))
    assert isinstance(body, fx.GraphModule)
    env = dict(
        zip(body.graph.find_nodes(op="placeholder"), node.args[num_settings + 1 :], strict=True)
    )
    is_autocast = node.target is _hop.wrap_with_autocast
    with gm.graph.inserting_before(node):
        enter = gm.graph.call_function(enter_autocast, settings) if is_autocast else None
        for inner in body.graph.nodes:
            if inner.op not in ("placeholder", "output"):
                env[inner] = _copy(gm, body, inner, env)
        if enter is not None:
            gm.graph.call_function(exit_autocast, (enter,))
    _replace(node, map_arg(body.graph.output_node().args[0], env.__getitem__))
    if not body_node.users:
        gm.graph.erase_node(body_node)
        if not gm.graph.find_nodes(op="get_attr", target=body_node.target):
            gm.delete_submodule(str(body_node.target))


def _copy(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node, env: dict[Any, Any]) -> fx.Node:
    copy = gm.graph.node_copy(node, env.__getitem__)
    if node.op == "get_attr":
        copy.target = _add_attribute(gm, operator.attrgetter(str(node.target))(body))
    return copy


def _add_attribute(gm: fx.GraphModule, attribute: Any) -> str:
    """Adds an attribute of a body to the outer graph module; returns its new name."""
    names = (f"region_{index}" for index in range(len(gm._modules) + len(gm._buffers) + 1))
    name = next(name for name in names if not hasattr(gm, name))
    if isinstance(attribute, torch.Tensor) and not isinstance(attribute, torch.nn.Parameter):
        gm.register_buffer(name, attribute)
    else:
        setattr(gm, name, attribute)
    return name


def _replace(node: fx.Node, results: Any) -> None:
    """Replaces the results of a region with those of its inlined body."""
    if not isinstance(results, (tuple, list)):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _move_captured(graph: fx.Graph) -> None:
    """Moves captured values from ``val``, which passes overwrite, to ``CAPTURED``."""
    new_nodes = [node for node in graph.nodes if not CAPTURED.is_on(node)]
    remember_captured(graph)
    for node in new_nodes:
        if VALUE.is_on(node):
            VALUE.drop(node)

"""Takes casts of weights out of the graph: a kept copy becomes an input.

Before:
    %weight          = placeholder[weight]
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After (where autograd records the cast; elsewhere the copy is used as it is):
    %weight          = placeholder[weight]
    %weight_kept     = placeholder[weight_kept]
    %weight_bfloat16 = amp_fx.kept_cast(%weight, %weight_kept)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)

Every cast is replaced where it stands, so that what was shared stays shared and no
gradient changes; bodies of higher-order ops (checkpoints) get the copy as one more operand.
Left alone on purpose: weights that the graph writes, casts that an output or a view handed
out may alias, weights with symbolic sizes, and regions with ``cache_enabled=False``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from amp_fx.bodies import append_operand, bodies_of, is_rewritten
from amp_fx.casts import inserted_cast
from amp_fx.kept_cast import Slot, kept_cast
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_casts import has_gradient, is_aliased
from amp_fx.values import analysis, detect_fake_mode, set_value, value_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    _CopyOf = Callable[[fx.Node, torch.dtype], fx.Node]
    """The node that stands for a copy of a weight, in the graph of that weight's node."""


@dataclasses.dataclass(frozen=True)
class KeepWeightCasts:
    """Replaces casts of weights by inputs.

    Attributes:
        weights: Names of the placeholders whose casts may be kept, each with the names of
            the inputs that share its storage, itself included.
    """

    name: ClassVar[str] = "keep_weight_casts"
    weights: tuple[tuple[str, tuple[str, ...]], ...]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weight_casts_kept``; marks new placeholders with ``kept_input``."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        fake_mode = detect_fake_mode(gm.graph)
        kept: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

        def copy_of(source: fx.Node, dtype: torch.dtype) -> fx.Node:
            if (source, dtype) not in kept:
                kept[source, dtype] = _add_placeholder(gm.graph, source, dtype, fake_mode)
            return kept[source, dtype]

        num_kept = _keep(gm, self._keepable(placeholders), copy_of)
        for (source, dtype), node in kept.items():
            is_read = any(user.target is not kept_cast for user in source.users)
            index = placeholders.index(source)
            node.meta["kept_input"] = Slot(index, dtype, is_read)
        return PassResult(Counter(weight_casts_kept=num_kept))

    def _keepable(self, placeholders: list[fx.Node]) -> dict[int, fx.Node]:
        """Weights to which the graph does not write, by the ``id`` of their values."""
        by_name = {node.name: node for node in placeholders}
        written = {name for name, node in by_name.items() if is_written(node)}
        weights = [by_name[name] for name, sharing in self.weights if written.isdisjoint(sharing)]
        return {id(value_of(node)): node for node in weights}


def _keep(gm: fx.GraphModule, keepable: dict[int, fx.Node], copy_of: _CopyOf) -> int:
    """Replaces the casts of weights in one graph, and in the bodies that it calls."""
    num_kept = 0
    for node in list(gm.graph.nodes):
        if is_rewritten(node):
            num_kept += _keep_in_bodies(node, bodies_of(gm, node), keepable, copy_of)
            continue
        source = _kept_source(node, keepable)
        if source is not None:
            _replace(gm.graph, node, source, copy_of(source, value_of(node).dtype))
            num_kept += 1
    return num_kept


def _keep_in_bodies(
    node: fx.Node, bodies: list[fx.GraphModule], keepable: dict[int, fx.Node], copy_of: _CopyOf
) -> int:
    """Hands copies on to the bodies of a higher-order op, all of which get all operands."""
    added: dict[tuple[int, torch.dtype], list[fx.Node]] = {}

    def copies_of(source: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
        key = id(value_of(source)), dtype
        if key not in added:
            append_operand(node, copy_of(keepable[key[0]], dtype))
            fake_mode = detect_fake_mode(bodies[0].graph)
            added[key] = [_add_placeholder(b.graph, source, dtype, fake_mode) for b in bodies]
        return added[key]

    num_kept = 0
    for index, body in enumerate(bodies):
        by_value = {id(value_of(n)): n for n in body.graph.find_nodes(op="placeholder")}
        inside = {value: n for value, n in by_value.items() if value in keepable}
        num_kept += _keep(body, inside, lambda s, d, i=index: copies_of(s, d)[i])  # type: ignore[misc]
    return num_kept


def _kept_source(node: fx.Node, keepable: dict[int, fx.Node]) -> fx.Node | None:
    """The weight of a cast that can be kept; None for any other node."""
    cast = inserted_cast(node)
    if cast is None or not node.meta["site"].state.cache_enabled:
        return None
    source = keepable.get(id(value_of(node.all_input_nodes[0])))
    if source is None or is_aliased(node) or free_symbols(value_of(source)):
        return None
    return source if all(user.op != "output" for user in node.users) else None


def is_written(placeholder: fx.Node) -> bool:
    """Whether the graph writes to one of its inputs, as the walk of its nodes saw it."""
    value = value_of(placeholder)
    if not isinstance(value, torch.Tensor):
        return False
    version = version_of(value)
    return version is None or version != placeholder.meta["version"]


def _add_placeholder(
    graph: fx.Graph, source: fx.Node, dtype: torch.dtype, fake_mode: FakeTensorMode | None
) -> fx.Node:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(f"{source.name}_{str(dtype).removeprefix('torch.')}_kept")
    with analysis(fake_mode, is_grad_enabled=False):
        set_value(node, torch.empty_like(value_of(source), dtype=dtype, requires_grad=False))
    node.meta["captured"] = value_of(node)
    node.meta["site"] = source.meta["site"]
    # What Dynamo tells AOTAutograd of an input: its origin, and that its address is fixed.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = None
    return node


def _replace(graph: fx.Graph, cast: fx.Node, source: fx.Node, copy: fx.Node) -> None:
    if not has_gradient(cast):
        cast.replace_all_uses_with(copy)
        graph.erase_node(cast)
        return
    cast.target = kept_cast
    cast.args = (source, copy)
    cast.kwargs = {}
    del cast.meta["cast"]

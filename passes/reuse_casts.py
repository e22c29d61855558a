"""Moves casts across ops that only select elements, where the other dtype is there already.

Before:
    %wide = aten._to_copy(%x, dtype=torch.float32)
    %y    = aten.upsample_nearest2d.vec(%wide, None, [2.0, 2.0])
    %low  = aten._to_copy(%y, dtype=torch.float16)
After:
    %low  = aten.upsample_nearest2d.vec(%x, None, [2.0, 2.0])

Before:
    %low  = aten._to_copy(%x, dtype=torch.float16)
    %y    = aten.permute(%x, [0, 2, 1])
    %cast = aten._to_copy(%y, dtype=torch.float16)
After:
    %low  = aten._to_copy(%x, dtype=torch.float16)
    %cast = aten.permute(%low, [0, 2, 1])

No bits change, because rounding each element commutes with selecting elements, with negation and
with maxima. Compilers fuse such casts; in a file, each is a node.

Left unchanged: results that are also read without the cast; casts for which others would be needed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.bodies import bodies_of, has_plain_bodies
from amp_fx.graphs.casts import WHOLE_VIEWS, is_reinterpreting, is_widening, op_name
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import detect_fake_mode, update_value
from amp_fx.passes.base import PassResult
from amp_fx.weights.prepare import cast_dtype

if TYPE_CHECKING:
    from torch import fx

_SELECTIONS = WHOLE_VIEWS | {
    "aten::cat",
    "aten::clone",
    "aten::contiguous",
    "aten::expand",
    "aten::flatten",
    "aten::flip",
    "aten::gather",
    "aten::index_select",
    "aten::mT",
    "aten::max_pool1d",
    "aten::max_pool2d",
    "aten::max_pool3d",
    "aten::movedim",
    "aten::narrow",
    "aten::neg",
    "aten::relu",
    "aten::repeat",
    "aten::select",
    "aten::slice",
    "aten::stack",
    "aten::swapaxes",
    "aten::swapdims",
    "aten::unflatten",
    "aten::upsample_nearest1d",
    "aten::upsample_nearest2d",
    "aten::upsample_nearest3d",
}
"""Ops whose results contain elements of their inputs, perhaps negated, or zeros."""


@dataclasses.dataclass(frozen=True)
class ReuseCasts:
    """Removes casts of selections from tensors that exist in the dtype of the cast.

    Attributes:
        without_kernels: Low dtypes in which a runtime cannot select.
    """

    name: ClassVar[str] = "reuse_casts"
    without_kernels: tuple[torch.dtype, ...] = ()

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``casts_reused``, also in bodies of ``cond``."""
        counts: Counter[str] = Counter()
        for node in list(gm.graph.nodes):
            if has_plain_bodies(node):
                for body in bodies_of(gm, node):
                    counts.update(self.call(body).counts)
            elif _cast_dtype(node) not in (None, *self.without_kernels):
                counts["casts_reused"] += _reuse(node)
        return PassResult(counts)


def _cast_dtype(node: fx.Node) -> torch.dtype | None:
    return cast_dtype(node) if node.op == "call_function" else None


def _reuse(cast: fx.Node) -> bool:
    """Removes a cast, if its source is selected from tensors that exist in its dtype."""
    graph, dtype = cast.graph, VALUE.of(cast).dtype
    selections = _selections_before(cast)
    sources = {n for node in selections for n in node.all_input_nodes if _is_floating(n)}
    given = {node: _in_dtype(node, dtype, cast) for node in sources.difference(selections)}
    if not selections or None in given.values():
        return False
    for source, same in given.items():
        assert same is not None
        if same.all_input_nodes == [source] and source.op != "placeholder":
            source.append(same)  # a later cast would come after the selections that now read it
        elif same.all_input_nodes == [source]:
            graph.find_nodes(op="placeholder")[-1].append(same)
        for node in selections:
            node.replace_input_with(source, same)
    mode = detect_fake_mode(graph)
    for node in reversed(selections):
        update_value(node, mode, is_grad_enabled=False)
    cast.replace_all_uses_with(selections[0])
    graph.erase_node(cast)
    for source in given:
        if not source.users and source.op != "placeholder":
            graph.erase_node(source)
    return True


def _selections_before(cast: fx.Node) -> list[fx.Node]:
    """Returns the selections that only a cast reads, in reverse order."""
    selections: list[fx.Node] = []
    pending = [*cast.all_input_nodes]
    while pending:
        node = pending.pop()
        is_selection = op_name(node) in _SELECTIONS and not is_reinterpreting(node)
        if node not in selections and is_selection and {*node.users} <= {cast, *selections}:
            selections.append(node)
            pending += filter(_is_floating, node.all_input_nodes)
    return sorted(selections, reverse=True)


def _is_floating(node: fx.Node) -> bool:
    value = VALUE.get(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _in_dtype(node: fx.Node, dtype: torch.dtype, cast: fx.Node) -> fx.Node | None:
    """Returns an existing node with the numbers of another one in a dtype."""
    is_lossless = is_widening(dtype, VALUE.of(node).dtype)
    if _cast_dtype(node) is not None and is_lossless:
        [source] = node.all_input_nodes
        if VALUE.of(source).dtype is dtype:
            return source
    casts = [user for user in node.users if _cast_dtype(user) is dtype and user is not cast]
    return casts[0] if casts else None

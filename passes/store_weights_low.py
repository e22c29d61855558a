"""Stores weights in the low-precision dtype in which every reader takes them.

Before:
    %weight          = placeholder[weight]                # float32
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After:
    %weight          = placeholder[weight]                # bfloat16
    %y               = aten.linear(%x_bfloat16, %weight)

The numbers stay: a cast of a view is a view of the cast. Who runs the pass casts the tensors
themselves. Left alone on purpose: weights that anything reads in float32, or in two dtypes
(``passes.low_reads``); casts whose results are laid out otherwise than what they cast, written
to or handed out, which a weight must not be.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.bodies import drop_unused_operands
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import SITE, STORED_LOW, VERSION
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    call_target,
    detect_fake_mode,
    set_value,
    storage_id,
    tensors_in,
    value_of,
    version_of,
)
from amp_fx.passes.base import PassResult
from amp_fx.passes.low_reads import is_view, low_reads, readers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class StoreWeightsLow:
    """Takes out casts of weights, whose placeholders become low.

    Attributes:
        groups: Names of the placeholders that may, those that share a storage together: either
            all of them can be low, or none.
    """

    name: ClassVar[str] = "store_weights_low"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    groups: tuple[tuple[str, ...], ...]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weights_stored_low``, and ``casts_removed``."""
        counts: Counter[str] = Counter()
        drop_unused_operands(gm, {name for group in self.groups for name in group})
        by_name = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        groups = [[by_name[name] for name in group if name in by_name] for group in self.groups]
        for weight, dtype in _storable(gm, groups).items():
            counts["casts_removed"] += _store(gm, weight, dtype)
            counts["weights_stored_low"] += 1
        return PassResult(counts)


def _storable(
    gm: fx.GraphModule, groups: Sequence[Sequence[fx.Node]]
) -> dict[fx.Node, torch.dtype]:
    """The weights to store low, those that nobody reads with those that share their storage."""
    reads = low_reads(gm)
    handed_out = {
        storage_id(tensor)
        for node in gm.graph.output_node().all_input_nodes
        for tensor in tensors_in(value_of(node))
    }
    found: dict[fx.Node, torch.dtype] = {}
    for group in groups:
        read = [weight for weight in group if weight.users]
        dtypes = {reads[weight].dtype if weight in reads else None for weight in read}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        casts = [cast for weight in read for cast, _ in readers(gm, weight)]
        if dtype is not None and all(_may_go(cast, handed_out) for cast in casts):
            found.update(dict.fromkeys(group, dtype))
    return found


def _may_go(cast: fx.Node, handed_out: set[int]) -> bool:
    """Returns True if what a cast gives may be the weight itself, or a view of it."""
    value, source = value_of(cast), value_of(cast.all_input_nodes[0])
    if version_of(value) != VERSION.get(cast) or storage_id(value) in handed_out:
        return False
    return bool(value.stride() == source.stride())


def _store(gm: fx.GraphModule, weight: fx.Node, dtype: torch.dtype) -> int:
    """Makes a placeholder low; returns how many casts went."""
    casts = [cast for cast, _ in readers(gm, weight)]
    views = _views_of(weight)
    with analysis(detect_fake_mode(gm.graph), is_grad_enabled=SITE.of(weight).is_grad_enabled):
        set_value(weight, value_of(weight).detach().to(dtype))
        for node in [*views, *casts]:
            args, kwargs = argument_values(node)
            set_value(node, call_target(node, args, kwargs))
    num_removed = 0
    for cast in casts:
        source = cast.all_input_nodes[0]
        if value_of(source).dtype == dtype:  # else the program widened it by hand
            cast.replace_all_uses_with(source)
            gm.graph.erase_node(cast)
            num_removed += 1
    STORED_LOW.put(weight, num_removed)
    return num_removed


def _views_of(node: fx.Node) -> list[fx.Node]:
    """All views of a tensor, each behind what it is a view of."""
    found = [user for user in node.users if is_view(user, node)]
    return [view for user in found for view in (user, *_views_of(user))]

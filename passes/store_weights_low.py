"""Stores weights in the low-precision dtype to which all their readers cast them.

Before:
    %weight          = placeholder[weight]                # float32
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After:
    %weight          = placeholder[weight]                # bfloat16
    %y               = aten.linear(%x_bfloat16, %weight)

Left unchanged: weights that are read in float32 or in two dtypes (``passes.low_reads``); weights
with a cast that has other strides, is written to or is returned.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.bodies import drop_unused_operands
from amp_fx.graphs.casts import replace_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import SITE, VALUE, VERSION
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    call_target,
    detect_fake_mode,
    set_value,
    storage_id,
    tensors_in,
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
    """Removes casts of weights and changes the dtype of their placeholders.

    No bits change, because casts and views commute. The caller casts the weights themselves.

    Attributes:
        groups: Names of the placeholders that may be stored low, grouped by storage: all
            placeholders of a group are stored low, or none.
    """

    name: ClassVar[str] = "store_weights_low"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    groups: tuple[tuple[str, ...], ...]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weights_stored_low`` and ``casts_removed``."""
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
    """Returns the weights to store low, including unused weights that share their storage."""
    reads = low_reads(gm)
    returned = {
        storage_id(tensor)
        for node in gm.graph.output_node().all_input_nodes
        for tensor in tensors_in(VALUE.get(node))
    }
    storable: dict[fx.Node, torch.dtype] = {}
    for group in groups:
        used = [weight for weight in group if weight.users]
        dtypes = {reads[weight].dtype if weight in reads else None for weight in used}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        casts = [cast for weight in used for cast, _ in readers(gm, weight)]
        if dtype is not None and all(_can_remove(cast, returned) for cast in casts):
            storable.update(dict.fromkeys(group, dtype))
    return storable


def _can_remove(cast: fx.Node, returned: set[int]) -> bool:
    """Returns True if the weight itself, or a view of it, can replace a cast."""
    value, source = VALUE.of(cast), VALUE.of(cast.all_input_nodes[0])
    if version_of(value) != VERSION.get(cast) or storage_id(value) in returned:
        return False
    return bool(value.stride() == source.stride())


def _store(gm: fx.GraphModule, weight: fx.Node, dtype: torch.dtype) -> int:
    """Changes the dtype of a placeholder; returns the number of casts that were removed."""
    casts = [cast for cast, _ in readers(gm, weight)]
    views = _views_of(weight)
    with analysis(detect_fake_mode(gm.graph), is_grad_enabled=SITE.of(weight).is_grad_enabled):
        set_value(weight, VALUE.of(weight).detach().to(dtype))
        for node in [*views, *casts]:
            args, kwargs = argument_values(node)
            set_value(node, call_target(node, args, kwargs))
    num_removed = 0
    for cast in casts:
        source = cast.all_input_nodes[0]
        if VALUE.of(source).dtype == dtype:  # otherwise the program itself widens the weight
            replace_cast(cast, source, f"the weight is stored in {dtype_name(dtype)}")
            num_removed += 1
    return num_removed


def _views_of(node: fx.Node) -> list[fx.Node]:
    """Returns all views of a tensor in topological order."""
    views = [user for user in node.users if is_view(user, node)]
    return [nested for view in views for nested in (view, *_views_of(view))]

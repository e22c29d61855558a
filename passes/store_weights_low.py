"""Has weights stored in the low dtype that everybody reads them in.

Before:
    %weight          = placeholder[weight]                # float32
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After:
    %weight          = placeholder[weight]                # bfloat16
    %y               = aten.linear(%x_bfloat16, %weight)

The numbers stay: a cast of a view is a view of the cast. Who runs the pass casts the tensors
themselves. Left alone on purpose: weights that anything reads in float32, or in two dtypes
(``graphs.low_reads``); weights that the program writes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.bodies import drop_unused_operands
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.low_reads import casts_of, is_view, low_reads
from amp_fx.graphs.metadata import SITE, STORED_LOW
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    call_target,
    detect_fake_mode,
    set_value,
    value_of,
)
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    import torch
    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class StoreWeightsLow:
    """Takes out casts of weights, whose placeholders become low.

    Attributes:
        groups: Names of the placeholders that may, those that share a storage together.
    """

    name: ClassVar[str] = "store_weights_low"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    groups: tuple[tuple[str, ...], ...]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weights_stored_low``, and ``casts_removed``."""
        counts: Counter[str] = Counter()
        by_name = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        groups = [[by_name[name] for name in group if name in by_name] for group in self.groups]
        drop_unused_operands(gm, {name for group in self.groups for name in group})
        fake_mode = detect_fake_mode(gm.graph)
        for weight, dtype in low_reads(gm.graph, groups).items():
            casts, _ = casts_of(weight)
            _make_low(weight, dtype, fake_mode)
            for cast in casts:
                cast.replace_all_uses_with(cast.all_input_nodes[0])
                gm.graph.erase_node(cast)
            STORED_LOW.put(weight, len(casts))
            counts["weights_stored_low"] += 1
            counts["casts_removed"] += len(casts)
        return PassResult(counts)


def _make_low(weight: fx.Node, dtype: torch.dtype, fake_mode: FakeTensorMode | None) -> None:
    is_grad_enabled = SITE.of(weight).is_grad_enabled
    with analysis(fake_mode, is_grad_enabled=is_grad_enabled):
        set_value(weight, value_of(weight).detach().to(dtype))
        _revalue_views(weight)


def _revalue_views(node: fx.Node) -> None:
    for user in node.users:
        if is_view(user):
            args, kwargs = argument_values(user)
            set_value(user, call_target(user, args, kwargs))
            _revalue_views(user)

"""Merges equal pure nodes, so that equal values of weights are computed and packed once.

Before:
    %a = prims.convert_element_type(%frozen, torch.bfloat16)
    %b = prims.convert_element_type(%frozen, torch.bfloat16)
    %y = aten.add(%a, %b)
After:
    %a = prims.convert_element_type(%frozen, torch.bfloat16)
    %y = aten.add(%a, %a)

Left unchanged: tensors that are one number throughout (``full``). Inductor computes the number
where it is read, but writes a tensor with several readers to memory, and with it what a reader
concatenates to it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.purity import is_pure
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.patches import merging_all_but

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class MergeDuplicates:
    """Eliminates common subexpressions."""

    name: ClassVar[str] = "merge_duplicates"
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``merged_nodes``."""
        from amp_fx.torch_private.aot_autograd import compile_utils

        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        impure = [compile_utils.get_aten_target(node) for node in calls if not is_pure(node)]
        num_nodes = len(gm.graph.nodes)
        with merging_all_but([torch.ops.aten.full, *impure]):
            gm.graph = compile_utils.fx_graph_cse(gm.graph)
        return PassResult(Counter(merged_nodes=num_nodes - len(gm.graph.nodes)))

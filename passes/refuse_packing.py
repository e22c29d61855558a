"""Rejects packed graphs whose kernels add up in another order than ATen's (``numerics``).

Before and after: the same graph. The caller compiles the graph without constants instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.casts import op_name
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.weights.pack import CannotPackError

if TYPE_CHECKING:
    from torch import fx


@dataclasses.dataclass(frozen=True)
class RefusePacking:
    """Raises ``CannotPackError`` for float32 convolutions, whose bits differ for some sizes.

    Float32 products are not packed.
    """

    name: ClassVar[str] = "refuse_packing"
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts nothing."""
        packed = [node for node in gm.graph.nodes if op_name(node).startswith("mkldnn::")]
        inputs = [VALUE.of(node.all_input_nodes[0]) for node in packed]
        if any(value.dtype is torch.float32 for value in inputs):
            raise CannotPackError("a packed float32 kernel adds up in another order than ATen's")
        return PassResult(Counter())

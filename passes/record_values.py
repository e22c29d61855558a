"""Records the values of nodes that inductor's passes added without them.

Before:
    %y = aten.mul(%x, 2)        # no meta["val"]
After:
    %y = aten.mul(%x, 2)        # meta["val"] is a fake tensor

Inductor computes all values again before it generates code. The passes on AOTAutograd's graphs run
before that, and read dtypes, devices and layouts.

Left unchanged: nodes with a value, which AOTAutograd recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.graphs.bodies import graph_modules_in
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.fake_tensors import detect_fake_mode, with_real_tensors
from amp_fx.torch_private.pytree import tree_leaves

if TYPE_CHECKING:
    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class RecordValues:
    """Evaluates the calls without values on fake tensors."""

    name: ClassVar[str] = "record_values"
    is_needed: ClassVar[bool] = True
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``values_recorded``."""
        counts: Counter[str] = Counter()
        for module in graph_modules_in(gm):
            for node in module.graph.nodes:
                if node.op == "call_function" and not VALUE.is_on(node):
                    _record(module, node)
                    counts["values_recorded"] += 1
        return PassResult(counts)


def _record(gm: fx.GraphModule, node: fx.Node) -> None:
    def value_of(source: fx.Node) -> Any:
        is_packed = source.op == "get_attr" and not VALUE.is_on(source)
        # Packed weights have no fake tensors. Their nodes must not hold the real ones.
        return operator.attrgetter(str(source.target))(gm) if is_packed else VALUE.get(source)

    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    fake_mode: Any = detect_fake_mode(tree_leaves((args, kwargs)))
    with with_real_tensors(fake_mode), fake_mode or contextlib.nullcontext(), torch.no_grad():
        VALUE.put(node, node.target(*args, **kwargs))  # type: ignore[operator]

"""Returns the float32 sums of products that compute gradients of weights (``weight_grads``).

Before, in a backward graph:
    %grad = aten.mm(%rows, %tangents)                                # bfloat16
    %y    = prims.convert_element_type(%grad, torch.float32)         # is returned
After:
    %y    = aten.mm.dtype(%rows, %tangents, torch.float32)

Autocast computes the gradient of a weight in low precision and casts it to float32: it is rounded,
written, read and written again. ``aten.mm.dtype`` (``aten.bmm.dtype`` for weights of experts)
returns the float32 sums of the hardware, which saves a rounding and 6 of 8 bytes per element.

Left unchanged: products with other readers, such as those that a checkpoint recomputes; gradients
that are returned in the low dtype; devices without these kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.weights.aliases import tangents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.graphs.conditions import Condition

aten = torch.ops.aten

DEVICES = ("cuda",)
"""Device types on which ``aten.mm.dtype`` and ``aten.bmm.dtype`` compute gradients of weights.

XPU has these kernels too (``WITH_OUT_DTYPE``), but gradients have not been run there.
"""

_VIEWS = (
    aten.permute.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    aten._unsafe_view.default,
)


@dataclasses.dataclass(frozen=True)
class WidenWeightGrads:
    """Makes low-precision products return float32 if a backward casts and returns their results."""

    name: ClassVar[str] = "widen_weight_grads"
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``wide_weight_grads``."""
        counts: Counter[str] = Counter()
        for graph in filter(tangents, graphs_in(gm)):  # what a forward returns stays rounded
            products = [(cast, _product(cast)) for cast in _returned_casts(graph)]
            for cast, product in products:
                if product is not None:
                    _widen(graph, cast, product)
                    counts["wide_weight_grads"] += 1
            if any(product is not None for _, product in products):
                graph.eliminate_dead_code()
        return PassResult(counts)


@functools.cache
def wide_products() -> dict[Any, Any]:
    """Returns the product with a float32 result for each product.

    Relies on inductor's lowering of ``aten.bmm`` having a parameter ``out_dtype`` if
    ``aten.bmm.dtype`` can be lowered.
    """
    from amp_fx.torch_private.inductor import tuned_bmm

    products = {aten.mm.default: aten.mm.dtype}
    if "out_dtype" in inspect.signature(tuned_bmm).parameters:
        products[aten.bmm.default] = aten.bmm.dtype
    return products


def _returned_casts(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields casts to float32 whose results, or sums of them, are only returned."""
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        if node.args[1] == torch.float32 and _is_returned(node):
            yield node


def _is_returned(node: fx.Node) -> bool:
    users = list(node.users)
    return bool(users) and all(
        user.op == "output" or (user.target is aten.add.Tensor and _is_returned(user))
        for user in users
    )


def _product(cast: fx.Node) -> fx.Node | None:
    """Returns the product that a cast reads through views, if it has no other readers."""
    node = cast.all_input_nodes[0]
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    if node.target not in wide_products() or len(node.users) != 1:
        return None
    value = VALUE.of(node)
    is_known = value.device.type in DEVICES and is_low(value.dtype)
    return node if is_known else None


def _widen(graph: fx.Graph, cast: fx.Node, product: fx.Node) -> None:
    with graph.inserting_after(product):
        wide_product = wide_products()[product.target]
        wide = graph.call_function(wide_product, (*product.args, torch.float32))
    wide.meta = dict(product.meta)
    product.replace_all_uses_with(wide)
    node = cast
    while node is not wide:  # the cast is a no-op now, and the views are float32
        node = node.all_input_nodes[0]
        VALUE.put(node, VALUE.of(node).to(torch.float32))
    cast.replace_all_uses_with(cast.all_input_nodes[0])

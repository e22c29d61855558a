"""Rewrites of the graphs that AOTAutograd makes: ``weight_grads``, ``raise_casts``, wide products.

Autocast's product of a weight's gradient is low, and a cast makes it float32 for the weight: it is
rounded, written, read and written again. ``aten.mm.dtype``, and ``aten.bmm.dtype`` for weights of
experts, give the sums of the product in float32 as the hardware makes them: one rounding less, and
6 of 8 bytes per element less in between.
Products on CPUs without units for their dtype are the matter of ``widen_products``.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.devices.wide_products import units
from amp_fx.dtypes import is_low
from amp_fx.graphs import casts as casting
from amp_fx.graphs.casts import CONVERT
from amp_fx.passes import flatten_products as flattening
from amp_fx.passes import keep_eager_kernels as keeping
from amp_fx.passes import raise_casts as raising
from amp_fx.passes import widen_products as widening
from amp_fx.passes.flatten_products import flatten_products
from amp_fx.passes.keep_eager_kernels import keep_eager_kernels
from amp_fx.passes.raise_casts import raise_casts
from amp_fx.passes.widen_products import widen_products
from amp_fx.stats import record
from amp_fx.tables import generated
from amp_fx.torch_private.inductor_passes import CustomGraphPass, get_hash_for_files
from amp_fx.weights import few_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

aten = torch.ops.aten

DEVICES = ("cuda",)
"""Device types on which gradients of weights come from ``aten.mm.dtype`` and ``aten.bmm.dtype``.

XPU has the kernels, too (``WITH_OUT_DTYPE``); gradients there are autocast's.
"""

_MODULES = (casting, few_rows, flattening, generated, keeping, raising, widening)
_PASSES = (*(module.__file__ for module in _MODULES),)


@functools.cache
def _wide_products() -> dict[Any, Any]:
    """The products that give float32, by the ones that they take the place of.

    Relies on inductor's lowering of ``aten.bmm`` taking an ``out_dtype`` where ``aten.bmm.dtype``
    is lowered.
    """
    from amp_fx.torch_private.inductor import tuned_bmm

    found = {aten.mm.default: aten.mm.dtype}
    if "out_dtype" in inspect.signature(tuned_bmm).parameters:
        found[aten.bmm.default] = aten.bmm.dtype
    return found


_VIEWS = (
    aten.permute.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    aten._unsafe_view.default,
)


class AfterAutograd(CustomGraphPass):
    """Rewrites every graph before inductor lowers it.

    Relies on inductor running ``post_grad_custom_pre_pass`` on every graph, and on inputs of a
    backward that are gradients being called ``tangents``.

    Args:
        has_wide_grads: Whether gradients that leave a backward in float32 are products with
            float32 results.
        widens_products: Whether products run in float32 where the CPU has no units for the dtype.
        raises_casts: ``Options.raise_casts``.
        keeps_kernels: Whether ops run by ATen's kernels where generated code has other bits.
        following: A pass of the user's own, which runs after this one.
    """

    def __init__(
        self,
        *,
        has_wide_grads: bool = False,
        widens_products: bool = False,
        raises_casts: bool = False,
        keeps_kernels: bool = False,
        following: Any = None,
    ) -> None:
        self.has_wide_grads = has_wide_grads
        self.widens_products = widens_products
        self.raises_casts = raises_casts
        self.keeps_kernels = keeps_kernels
        self.following = following

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites a graph in place."""
        if self.has_wide_grads and is_backward(graph):
            widen_weight_grads(graph)
        self.change_products(graph)
        if self.raises_casts and raise_casts(graph):
            graph.lint()
        if self.keeps_kernels:
            keep_eager_kernels(graph)
        if self.following is not None:
            self.following(graph)

    def change_products(self, graph: fx.Graph) -> None:
        """Flattens products, and computes some in float32; weights are packed after that."""
        counts = Counter(flattened_products=flatten_products(graph))
        if self.widens_products:
            counts["wide_products"] = widen_products(graph)
        record(+counts)

    def uuid(self) -> Any:
        """Returns its part of the keys of inductor's caches; None if there is none.

        It says for which dtypes this CPU has units: caches that machines share, or one with other
        settings, would give low products to one without units.
        """
        files = (__file__, *_PASSES)
        has_units = units() if self.widens_products else ()
        chosen = (self.has_wide_grads, has_units, self.raises_casts, self.keeps_kernels)
        own = (get_hash_for_files(files), *chosen)
        if self.following is None:
            return own
        theirs = self.following.uuid() if isinstance(self.following, CustomGraphPass) else None
        return None if theirs is None else (own, theirs)


def is_backward(graph: fx.Graph) -> bool:
    """Returns True if a graph takes gradients."""
    return any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def widen_weight_grads(graph: fx.Graph) -> int:
    """Makes low products return float32 if their results are cast to float32 and returned.

    Returns:
        How many there were.
    """
    products = [found for cast in _returned_casts(graph) if (found := _product(cast)) is not None]
    for cast, product in products:
        _widen(graph, cast, product)
    if products:
        graph.eliminate_dead_code()
        graph.lint()
    return len(products)


def _returned_casts(graph: fx.Graph) -> Iterator[fx.Node]:
    """Casts to float32 whose results, or sums of them, are returned and nothing else."""
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        if node.args[1] == torch.float32 and _is_returned(node):
            yield node


def _is_returned(node: fx.Node) -> bool:
    users = list(node.users)
    return bool(users) and all(
        user.op == "output" or (user.target is aten.add.Tensor and _is_returned(user))
        for user in users
    )


def _product(cast: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A cast and the product behind it, if only views lie between and nobody else reads them."""
    node = cast.all_input_nodes[0]
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    if node.target not in _wide_products() or len(node.users) != 1:
        return None
    value = node.meta["val"]
    is_known = value.device.type in DEVICES and is_low(value.dtype)
    return (cast, node) if is_known else None


def _widen(graph: fx.Graph, cast: fx.Node, product: fx.Node) -> None:
    with graph.inserting_after(product):
        wide_product = _wide_products()[product.target]
        wide = graph.call_function(wide_product, (*product.args, torch.float32))
    wide.meta = dict(product.meta)
    product.replace_all_uses_with(wide)
    node = cast
    while node is not wide:  # the cast has nothing left to do, and views are of float32
        node = node.all_input_nodes[0]
        node.meta["val"] = node.meta["val"].to(torch.float32)
    cast.replace_all_uses_with(cast.all_input_nodes[0])

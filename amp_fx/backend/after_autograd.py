"""Rewrites the graphs of AOTAutograd: ``weight_grads`` and the products.

Autocast computes the gradient of a weight in low precision and casts it to float32: it is rounded,
written, read and written again. ``aten.mm.dtype`` (``aten.bmm.dtype`` for weights of experts)
returns the float32 sums of the hardware, which saves a rounding and 6 of 8 bytes per element.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.devices.wide_products import units
from amp_fx.dtypes import is_low
from amp_fx.graphs import casts as casting
from amp_fx.graphs.casts import CONVERT
from amp_fx.passes import flatten_products as flattening
from amp_fx.passes import keep_eager_kernels as keeping
from amp_fx.passes import open_attention as opening
from amp_fx.passes import round_compared as rounding
from amp_fx.passes import widen_products as widening
from amp_fx.passes.flatten_products import flatten_products
from amp_fx.passes.keep_eager_kernels import keep_eager_kernels
from amp_fx.passes.open_attention import open_attention
from amp_fx.passes.round_compared import round_compared
from amp_fx.passes.widen_products import widen_products
from amp_fx.stats import record
from amp_fx.tables import generated
from amp_fx.torch_private.inductor_passes import CustomGraphPass, get_hash_for_files
from amp_fx.weights import batch_norms, few_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

aten = torch.ops.aten

DEVICES = ("cuda",)
"""Device types on which ``aten.mm.dtype`` and ``aten.bmm.dtype`` compute gradients of weights.

XPU has these kernels too (``WITH_OUT_DTYPE``), but gradients have not been run there.
"""

_MODULES = (
    batch_norms,
    casting,
    few_rows,
    flattening,
    generated,
    keeping,
    opening,
    rounding,
    widening,
)
_PASSES = (*(module.__file__ for module in _MODULES),)


@functools.cache
def _wide_products() -> dict[Any, Any]:
    """Returns the product with a float32 result for each product.

    Relies on inductor's lowering of ``aten.bmm`` having a parameter ``out_dtype`` if
    ``aten.bmm.dtype`` can be lowered.
    """
    from amp_fx.torch_private.inductor import tuned_bmm

    products = {aten.mm.default: aten.mm.dtype}
    if "out_dtype" in inspect.signature(tuned_bmm).parameters:
        products[aten.bmm.default] = aten.bmm.dtype
    return products


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

    Relies on inductor running ``post_grad_custom_pre_pass`` on every graph, and on the names of a
    backward's inputs: gradients are called ``tangents``.

    Args:
        has_wide_grads: Whether products that compute float32 gradients return float32.
        chooses_kernels: Whether products and attention may add up in another order than in ATen's
            kernels: in float32 on a CPU without units for their dtype, or in generated code.
        keeps_kernels: Whether ops run in ATen's kernels if generated code has other bits.
        following: The user's ``post_grad_custom_pre_pass``, which runs after this pass.
    """

    def __init__(
        self,
        *,
        has_wide_grads: bool = False,
        chooses_kernels: bool = False,
        keeps_kernels: bool = False,
        following: Any = None,
    ) -> None:
        self.has_wide_grads = has_wide_grads
        self.chooses_kernels = chooses_kernels
        self.keeps_kernels = keeps_kernels
        self.following = following

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites a graph in place."""
        if self.has_wide_grads and is_backward(graph):
            widen_weight_grads(graph)
        self.prepare_packing(graph)
        self.widen_products(graph)
        record(+Counter(rounded_values=round_compared(graph)))
        if self.keeps_kernels:
            keep_eager_kernels(graph)
        if self.following is not None:
            self.following(graph)

    def prepare_packing(self, graph: fx.Graph) -> None:
        """Flattens products and opens attention. Must run before weights are packed.

        Where oneDNN has no kernels for bfloat16, a flattened product has other bits.
        """
        exact = (torch.bfloat16,) if has_product_kernels(torch.bfloat16) else ()
        dtypes = (torch.bfloat16, torch.float16) if self.chooses_kernels else exact
        num_flattened = flatten_products(graph, dtypes, keeps_bits=self.keeps_kernels)
        num_opened = open_attention(graph) if self.chooses_kernels else 0
        record(+Counter(flattened_products=num_flattened, opened_attention=num_opened))

    def widen_products(self, graph: fx.Graph) -> None:
        """Computes products in float32 if this CPU has no units for their dtype."""
        if self.chooses_kernels:
            record(+Counter(wide_products=widen_products(graph)))

    def uuid(self) -> Any:
        """Returns a key for inductor's caches; None if the user's pass has none.

        The key contains the dtypes for which this CPU has units, because machines share caches.
        """
        files = (__file__, *_PASSES)
        chosen = (self.has_wide_grads, self.chooses_kernels, self.keeps_kernels)
        own = (get_hash_for_files(files), units(), *chosen)
        if self.following is None:
            return own
        theirs = self.following.uuid() if isinstance(self.following, CustomGraphPass) else None
        return None if theirs is None else (own, theirs)


def is_backward(graph: fx.Graph) -> bool:
    """Returns True if a graph has gradients as inputs."""
    return any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def widen_weight_grads(graph: fx.Graph) -> int:
    """Makes low-precision products return float32 if the graph casts and returns their results.

    Returns:
        The number of changed products.
    """
    num_changed = 0
    for cast in list(_returned_casts(graph)):
        product = _product(cast)
        if product is not None:
            _widen(graph, cast, product)
            num_changed += 1
    if num_changed:
        graph.eliminate_dead_code()
        graph.lint()
    return num_changed


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
    if node.target not in _wide_products() or len(node.users) != 1:
        return None
    value = node.meta["val"]
    is_known = value.device.type in DEVICES and is_low(value.dtype)
    return node if is_known else None


def _widen(graph: fx.Graph, cast: fx.Node, product: fx.Node) -> None:
    with graph.inserting_after(product):
        wide_product = _wide_products()[product.target]
        wide = graph.call_function(wide_product, (*product.args, torch.float32))
    wide.meta = dict(product.meta)
    product.replace_all_uses_with(wide)
    node = cast
    while node is not wide:  # the cast is a no-op now, and the views are float32
        node = node.all_input_nodes[0]
        node.meta["val"] = node.meta["val"].to(torch.float32)
    cast.replace_all_uses_with(cast.all_input_nodes[0])

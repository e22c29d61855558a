"""Makes results batch-invariant: the bits of a row are those it has alone, in any batch.

Before:
    %scores  = aten.bmm.default(%query, %keys)
    %weights = aten._softmax.default(%scores, -1, False)
    %mean    = aten.mean.dim(%x, [-1], True)
After:
    %scores  = amp_fx.ordered_product.default(%query, %keys, None, 0.0, 1.0)
    %weights = amp_fx.ordered_softmax.default(%scores, -1, torch.float32, False)
    %mean    = amp_fx.ordered_sum.default(%x, [-1], True, torch.float32, True)

Implements ``numerics="invariant"``. Left unchanged: products with weights whose kernels were
measured; pointwise ops that round once; ops that move elements; backward graphs, in which gradients
of weights are sums over rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch

from amp_fx.csrc import load_rows
from amp_fx.devices.rows import differing_rows, is_rowwise
from amp_fx.errors import UnsupportedError
from amp_fx.graphs.casts import evaluate
from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.places import lines_of
from amp_fx.tables.generated import EXACT_POWERS, MOVES
from amp_fx.tables.rows import CAPACITY, EXACT, MEASURED, MIXING, RANDOM, ROUTING, ROWWISE, UNKNOWN
from amp_fx.torch_private.ops import DispatchKey, OpOverload, returns_alias
from amp_fx.torch_private.pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import fx

aten = torch.ops.aten
ordered: Any = torch.ops.amp_fx
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the ordered kernels support."""

_COMPOSITE = DispatchKey.CompositeImplicitAutograd


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes ``scaled_dot_product_attention`` as two products and a softmax, in float32.

    Raises:
        UnsupportedError: ``dropout_p`` is not 0.
    """
    if dropout_p > 0:
        raise UnsupportedError(f"scaled_dot_product_attention with dropout: {RANDOM}")
    if enable_gqa:
        count = query.size(-3) // key.size(-3)
        key, value = (x.repeat_interleave(count, -3) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1)
    scores = scores * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # The result of a query whose keys are all masked, such as padding, is zero.
    is_fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(is_fully_masked, 0.0)
    return (weights @ value.to(wide)).to(query.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes a linear layer as one product of two matrices, for all layouts of ``x``."""
    rows = x.reshape(-1, x.size(-1))
    product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.reshape(*x.shape[:-1], weight.size(0))


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Computes products with one matrix as one ``mm``, and others as ``bmm``."""
    if right.dim() == 1:
        return matmul(left, right.unsqueeze(-1)).squeeze(-1)
    if right.dim() == 2:
        rows = torch.mm(left.reshape(-1, left.size(-1)), right)
        return rows.reshape(*left.shape[:-1], right.size(-1))
    if left.dim() == 1:
        return matmul(left.unsqueeze(0), right).squeeze(-2)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    sides = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (left, right))
    return torch.bmm(*sides).reshape(*batch, left.size(-2), right.size(-1))


COMPOSITES: dict[Any, Callable[..., torch.Tensor]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
}
"""Composite ops whose decomposition in torch depends on sizes, layouts or gradients."""


@contextlib.contextmanager
def composites() -> Iterator[None]:
    """Context manager in which tracing decomposes ``COMPOSITES`` alike for all sizes and layouts.

    Relies on ``OpOverload.py_kernels``, which the dispatcher prefers while a graph is traced, and
    on ``_dispatch_cache``.
    """
    before = {op: op.py_kernels.get(_COMPOSITE) for op in COMPOSITES}
    try:
        _register(COMPOSITES)
        yield
    finally:
        _register(before)


def _register(kernels: dict[Any, Any]) -> None:
    for op, kernel in kernels.items():
        op.py_kernels.pop(_COMPOSITE, None)
        if kernel is not None:
            op.py_kernels[_COMPOSITE] = kernel
        op._dispatch_cache.clear()


def isolate_rows(graph: fx.Graph, weights: Iterable[int]) -> Counter[str]:
    """Replaces kernels whose results depend on sizes (``amp_fx/csrc/rows.cpp``), in place.

    Args:
        graph: A forward or inference graph of AOTAutograd whose nodes have their values, traced
            inside ``composites``.
        weights: The positions of the inputs that are parameters or buffers.

    Returns:
        The number of kernels that were replaced.

    Raises:
        UnsupportedError: An op mixes rows or is not known to be batch-invariant.
    """
    if load_rows() is None:
        raise UnsupportedError(
            "numerics='invariant' requires C++ kernels, which could not be built: run "
            "`python -m amp_fx env` for the reason"
        )
    _register_fakes()
    placeholders = graph.find_nodes(op="placeholder")
    constant = {placeholders[i] for i in weights}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.all_input_nodes and constant.issuperset(node.all_input_nodes):
            constant.add(node)
        if node.target in PRODUCTS and _is_measured_product(node, constant):
            continue
        call = _ordered_call(node)
        if call is not None:
            node.target, node.args = call[0], call[1:]
            evaluate(node)
            counts["ordered_kernels"] += 1
        elif reason := why_not(node):
            raise UnsupportedError(f"{node.target} is not batch-invariant: {reason}{_at(node)}")
    graph.lint()
    return counts


PACKED = ("mkldnn", "mkl", "onednn")
"""Namespaces of ops for which inductor's freezing passes pack weights."""


def mixes_packed_rows(graph: fx.Graph) -> bool:
    """Returns True if a packed kernel of a graph is not known to be batch-invariant."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") not in PACKED:
            continue
        if _name(node) != "_linear_pointwise":
            return True
        rows, result = (VALUE.of(operand) for operand in (node.all_input_nodes[0], node))
        if differing_rows(result.dtype, int(rows.shape[-1]), int(result.shape[-1])):
            return True
    return False


def why_not(node: fx.Node) -> str:
    """Returns the reason why an op may not be batch-invariant, or an empty string if it is."""
    op, name = node.target, _name(node)
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
        return RANDOM
    if _counts_tokens(node):
        return CAPACITY
    results = tree_leaves(VALUE.get(node))
    has_tensor = any(isinstance(result, torch.Tensor) for result in results)
    if not has_tensor or not any(_is_float(VALUE.get(n)) for n in node.all_input_nodes):
        return ""
    if not isinstance(op, OpOverload):
        return "" if getattr(op, "__module__", "") == "_operator" else UNKNOWN
    if name in MIXING:
        return MIXING[name]
    if name in MEASURED:
        args = torch.fx.node.map_arg(node.args, VALUE.get)
        is_rowwise_here = is_rowwise(op, args, node.kwargs)
        return "" if is_rowwise_here else "its kernel returns other bits for a row in a batch"
    is_known = returns_alias(op) or torch.Tag.pointwise in op.tags or name in MOVES | ROWWISE
    return "" if is_known or op.namespace == "prims" else UNKNOWN


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _name(node: fx.Node) -> str:
    return op_name(node).partition("::")[2]


def _counts_tokens(node: fx.Node) -> bool:
    """Returns True for a cumulative sum that counts the tokens routed to each expert."""
    if _name(node) != "cumsum":
        return False
    rank, dim = VALUE.of(node).dim(), cast("int", node.args[1])
    if rank < 2 or dim % rank == rank - 1:
        return False
    ancestors: set[fx.Node] = set()
    pending = [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - ancestors
        ancestors |= new
        pending += new
    return any(
        _name(ancestor) in ROUTING
        and any(_is_float(VALUE.get(n)) for n in ancestor.all_input_nodes)
        for ancestor in ancestors
    )


def _at(node: fx.Node) -> str:
    lines = lines_of(node)
    return f" ({lines[-1].file}:{lines[-1].number})" if lines else ""


PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
"""Products whose operands, two matrices or two batches of matrices, are the last two arguments."""

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Products of groups of rows with one matrix per group."""

SOFTMAXES = {aten._softmax.default: False, aten._log_softmax.default: True}
"""Softmax ops; True if the result is the logarithm."""
SUMS = {
    aten.sum.default: False,
    aten.sum.dim_IntList: False,
    aten.mean.default: True,
    aten.mean.dim: True,
}
"""Sums; True if the result is the mean."""


def _is_measured_product(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Returns True for a product with a weight whose kernel was measured to be batch-invariant."""
    left, right = cast("list[fx.Node]", node.args[-2:])
    value = VALUE.of(right)
    if right not in constant or left in constant or value.dim() != 2:
        return False
    return not differing_rows(value.dtype, *map(int, value.shape))


def _ordered_call(node: fx.Node) -> tuple[Any, ...] | None:
    """Returns the op and arguments that replace a node's, or None if its kernel may stay."""
    op, args, dtype = node.target, node.args, getattr(VALUE.get(node), "dtype", None)
    kwargs, node_kwargs = node.kwargs, {}
    if dtype not in DTYPES:
        return None
    if op in PRODUCTS:
        bias = args[0] if len(args) > 2 else None
        scales = [float(kwargs.get(name, 1)) for name in ("beta", "alpha")]  # type: ignore[arg-type]
        call = (ordered.ordered_product.default, *args[-2:], bias, *scales)
    elif str(op) in GROUPED:
        call = (ordered.ordered_grouped_product.default, *args[:3])
    elif op in SOFTMAXES:
        call = (ordered.ordered_softmax.default, *args[:2], dtype, SOFTMAXES[op])
    elif op in SUMS:
        rank = VALUE.of(node.all_input_nodes[0]).dim()
        dims = (args[1] if len(args) > 1 else None) or [*range(rank)]
        keeps = len(args) > 2 and bool(args[2])
        call = (ordered.ordered_sum.default, args[0], dims, keeps, dtype, SUMS[op])
    elif _depends_on_position(node):
        own = getattr(getattr(torch.ops.amp_fx_rows, _name(node)), op._overloadname)  # type: ignore[union-attr]
        _register_fake(own, op)
        call, node_kwargs = (own, *args), kwargs
    else:
        return None
    node.kwargs = node_kwargs
    return call


def _depends_on_position(node: fx.Node) -> bool:
    """Returns True for a pointwise op whose vector and scalar code may return different bits."""
    op, name = node.target, _name(node)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or name in EXACT | MOVES:
        return False
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return name != "pow" or node.args[1] not in EXACT_POWERS


@functools.cache
def _register_fake(row_op: Any, op: Any) -> None:
    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = op(*args, **kwargs)
        return result.new_empty(result.shape)

    torch.library.register_fake(row_op.name(), fake)


@functools.cache
def _register_fakes() -> None:
    """Registers the fake kernels of the ordered ops."""

    def product(left: Any, right: Any, *_: Any) -> Any:
        return left.new_empty((*left.shape[:-1], right.size(-1)))

    def softmax(x: Any, _: int, dtype: torch.dtype, *__: Any) -> Any:
        return x.new_empty(x.shape, dtype=dtype)

    def total(x: Any, dims: Any, keeps: bool, dtype: torch.dtype, *_: Any) -> Any:
        return x.new_empty(x.sum(dims, keeps).shape, dtype=dtype)

    fakes = {"product": product, "grouped_product": product, "softmax": softmax, "sum": total}
    for name, fake in fakes.items():
        torch.library.register_fake(f"amp_fx::ordered_{name}", cast("Callable[..., Any]", fake))

"""Folds batch norms, and other arithmetic by channel, into the weights of convolutions.

Before:
    %low  = prims.convert_element_type(%weight, torch.bfloat16)
    %conv = aten.convolution(%x, %low, None, ...)
    %a    = aten.sub(%conv, %mean)             # float32; %mean, %scale and %shift are constants
    %b    = aten.mul(%a, %scale)
    %c    = aten.add(%b, %shift)
    %y    = prims.convert_element_type(%c, torch.bfloat16)
After:
    %scaled = aten.mul(%weight, %scale)        # reshapes of constants are left out here
    %low    = prims.convert_element_type(%scaled, torch.bfloat16)
    %a      = aten.mul(aten.neg(%mean), %scale)
    %bias   = aten.add(%a, %shift)             # float32
    %y      = aten.convolution(%x, %low, %bias, ...)

In an exported program, the pass runs before the casts, when the weight is float32 and a batch norm
is one op. ``aten.sub`` to ``aten.add`` above are then ``aten.batch_norm``.

The weight is rounded once, after it is scaled. oneDNN's kernels add a float32 bias before they
round. So one rounding of the result remains of two, and the result is more accurate than without
folding. Inductor's own pass (``binary_folding``) scales the rounded weight, rounds it again, and
rounds the bias, which is less accurate than no folding.

Left alone on purpose: results that are not rounded to the convolution's dtype, so also arithmetic
before the casts, which show what is rounded; transposed convolutions. After the casts, where only
oneDNN's kernels take a float32 bias: one-dimensional convolutions, other devices, torch without
oneDNN, and float16, whose range scaled weights may leave.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import fx

from amp_fx.graphs.casts import CONVERT, add_call
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.weights.plan import is_preparable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

aten = torch.ops.aten

PACKED_DIMS = (4, 5)
"""Dimensions of the results of convolutions that inductor packs for oneDNN."""
_CONVOLUTIONS = (
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
)
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


@dataclasses.dataclass(frozen=True)
class FoldBatchNorms:
    """Folds arithmetic by channel after convolutions into their constants.

    Attributes:
        precedes_casts: Whether the graph has no casts yet.
        weights: Names of placeholders that are constants.
        accepts: Returns False for a folded weight or bias that must not replace the original.
    """

    name: ClassVar[str] = "fold_batch_norms"
    ops: ClassVar[frozenset[str]] = frozenset(op._schema.name for op in _CONVOLUTIONS)
    precedes_casts: bool = False
    weights: Collection[str] = ()
    accepts: Callable[[fx.Node], bool] = lambda _: True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``folded_norms``."""
        graph = gm.graph
        convolutions = [node for node in graph.nodes if node.target in _CONVOLUTIONS]
        if not convolutions or not (self.precedes_casts or has_onednn()):
            return PassResult(Counter())
        constants = self._constants(graph)
        find = _with_norm if self.precedes_casts else _with_arithmetic
        chains = [find(node, constants) for node in convolutions if _can_scale(node, constants)]
        num_folded = sum(_fold(chain, self.accepts) for chain in chains if chain)
        graph.eliminate_dead_code()
        return PassResult(Counter(folded_norms=num_folded))

    def _constants(self, graph: fx.Graph) -> set[fx.Node]:
        constants: set[fx.Node] = set()
        for node in graph.nodes:
            is_weight = node.op == "placeholder" and node.name in self.weights
            if is_weight or node.op == "get_attr" or is_preparable(node, constants):
                constants.add(node)
        return constants


def has_onednn() -> bool:
    """Returns True if torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _can_scale(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Returns True for a convolution whose weight and bias are constants."""
    if node.kwargs:
        return False
    _, weight, bias, *settings = _arguments(node)
    is_transposed = node.target is aten.convolution.default and settings[3]
    return not is_transposed and {weight, *([] if bias is None else [bias])} <= constants


def _arguments(convolution: fx.Node) -> tuple[Any, ...]:
    """Returns the input, weight, bias (or None) and settings of a convolution."""
    args: tuple[Any, ...] = convolution.args
    return args if len(args) > 2 else (*args, None)


def _with_norm(convolution: fx.Node, constants: set[fx.Node]) -> list[fx.Node]:
    """Returns a convolution and its batch norm before the casts; empty if there is none."""
    [user, *others] = convolution.users
    if others or user.target is not aten.batch_norm.default:
        return []
    _, weight, bias, mean, var, is_training, *_ = cast("tuple[Any, ...]", user.args)
    given = {n for n in (weight, bias) if n is not None} | {mean, var}
    is_wide = VALUE.of(_arguments(convolution)[1]).dtype is torch.float32
    return [convolution, user] if is_wide and not is_training and given <= constants else []


def _with_arithmetic(convolution: fx.Node, constants: set[fx.Node]) -> list[fx.Node]:
    """Returns a convolution and the ops after it to the one that rounds; empty if none does."""
    value = VALUE.of(convolution)
    is_packed = value.device.type == "cpu" and value.dim() in PACKED_DIMS
    if not is_packed or value.dtype is not torch.bfloat16:
        return []
    chain = [convolution]
    while len(chain[-1].users) == 1:
        [user] = chain[-1].users
        is_cast = user.target is CONVERT
        if not is_cast and not _scales_channels(user, chain[-1], value, constants):
            return []
        chain.append(user)
        if is_cast and VALUE.of(user).dtype == value.dtype:
            return chain if any(node.target is not CONVERT for node in chain[1:]) else []
    return []


def _scales_channels(
    node: fx.Node, source: fx.Node, result: torch.Tensor, constants: set[fx.Node]
) -> bool:
    """Returns True if a node scales or shifts each channel by float32 constants.

    Args:
        node: The node.
        source: Its input that depends on the convolution.
        result: The result of the convolution.
        constants: All constants.
    """
    if node.target not in _ARITHMETIC or node.kwargs:
        return False
    if VALUE.of(node).dtype is not torch.float32 or VALUE.of(node).shape != result.shape:
        return False
    left, right = cast("tuple[Any, Any]", node.args)
    other = right if left is source else left
    is_swapped = left is other and node.target not in _COMMUTATIVE
    return other in constants and not is_swapped and _is_by_channel(other, result)


def _is_by_channel(constant: Any, value: torch.Tensor) -> bool:
    """Returns True if a constant has one number for each channel of a value."""
    shape = VALUE.of(constant).shape
    sizes = [1] * (value.dim() - len(shape)) + list(shape)
    by_channel = [1, value.size(1)] + [1] * (value.dim() - 2)
    return sizes == by_channel and VALUE.of(constant).dtype.is_floating_point


def _fold(chain: Sequence[fx.Node], accepts: Callable[[fx.Node], bool]) -> bool:
    """Folds ops into the convolution before them; returns False if a constant is not accepted."""
    convolution, result = chain[0], chain[-1]
    graph = result.graph
    call = functools.partial(add_call, graph)

    def exact(node: fx.Node) -> fx.Node:
        """Returns a float32 constant that was not rounded."""
        if node.target is CONVERT and VALUE.of(node.all_input_nodes[0]).dtype is torch.float32:
            return node.all_input_nodes[0]
        is_wide = VALUE.of(node).dtype is torch.float32
        return node if is_wide else call(CONVERT, node, torch.float32)

    x, weight, bias, *settings = _arguments(convolution)
    with graph.inserting_before(result):
        scaled, shift = exact(weight), bias if bias is None else exact(bias)
        by_weight = [-1] + [1] * (VALUE.of(weight).dim() - 1)
        for op, constant in _arithmetic(chain):
            is_factor = op in (aten.mul.Tensor, aten.div.Tensor)
            if is_factor:
                scaled = call(op, scaled, call(aten.reshape.default, constant, by_weight))
            if shift is not None:
                shift = call(op, shift, constant)
            elif not is_factor:
                shift = constant if op is aten.add.Tensor else call(aten.neg.default, constant)
        if not all(accepts(node) for node in (scaled, shift) if node is not None):
            return False
        dtype, target = VALUE.of(weight).dtype, cast("Any", convolution.target)
        low = scaled if dtype is torch.float32 else call(CONVERT, scaled, dtype)
        folded = graph.call_function(target, (x, low, shift, *settings))
    folded.meta = dict(convolution.meta)
    result.replace_all_uses_with(folded)
    return True


def _arithmetic(chain: Sequence[fx.Node]) -> Iterator[tuple[Any, fx.Node]]:
    """Yields the arithmetic of a chain with vectors, which it adds to the graph."""
    call = functools.partial(add_call, chain[0].graph)
    for source, step in itertools.pairwise(chain):
        if step.target in _ARITHMETIC:
            [other] = {*step.all_input_nodes} - {source}
            yield step.target, call(aten.reshape.default, other, [-1])
        elif step.target is aten.batch_norm.default:
            _, weight, bias, mean, var, _, _, eps, *_ = cast("tuple[Any, ...]", step.args)
            yield aten.sub.Tensor, mean
            yield aten.mul.Tensor, call(aten.rsqrt.default, call(aten.add.Tensor, var, eps))
            if weight is not None:
                yield aten.mul.Tensor, weight
            if bias is not None:
                yield aten.add.Tensor, bias

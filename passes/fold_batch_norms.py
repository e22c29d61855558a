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

The weight is rounded once, after it is scaled. oneDNN's kernels add a float32 bias before they
round. So one rounding of the result remains of two, and the result is more accurate than without
folding. Inductor's own pass (``binary_folding``) scales the rounded weight, rounds it again, and
rounds the bias, which is less accurate than no folding.

Left alone on purpose: float16, whose range scaled weights may leave; results that are not rounded
to the convolution's dtype; transposed and one-dimensional convolutions, other devices, and torch
without oneDNN, whose kernels take no float32 bias.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import fx

from amp_fx.graphs.casts import CONVERT, add_call
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.weights.plan import is_preparable

if TYPE_CHECKING:
    from collections.abc import Collection

aten = torch.ops.aten

PACKED_DIMS = (4, 5)
"""Dimensions of the results of convolutions that inductor packs for oneDNN."""
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


@dataclasses.dataclass(frozen=True)
class Affine:
    """Arithmetic after a convolution that scales and shifts each channel by constants.

    Attributes:
        convolution: The convolution.
        steps: Its ops with their constants, in order.
        result: The node that rounds its result to the dtype of the convolution.
    """

    convolution: fx.Node
    steps: tuple[tuple[Any, fx.Node], ...]
    result: fx.Node


@dataclasses.dataclass(frozen=True)
class FoldBatchNorms:
    """Folds arithmetic by channel after bfloat16 convolutions into their constants."""

    name: ClassVar[str] = "fold_batch_norms"

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``folded_norms``."""
        if not has_onednn():
            return PassResult(Counter())
        graph, constants = gm.graph, _constants(gm.graph)
        convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
        found = [_affine_after(convolution, constants) for convolution in convolutions]
        affines = [affine for affine in found if affine is not None]
        for affine in affines:
            _fold(affine)
        if affines:
            graph.eliminate_dead_code()
        return PassResult(Counter(folded_norms=len(affines)))


def has_onednn() -> bool:
    """Returns True if torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _constants(graph: fx.Graph) -> set[fx.Node]:
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or is_preparable(node, constants):
            constants.add(node)
    return constants


def _affine_after(convolution: fx.Node, constants: Collection[fx.Node]) -> Affine | None:
    _, weight, bias, *_ = convolution.args
    is_transposed = convolution.args[6]
    value = VALUE.of(convolution)
    if (
        is_transposed
        or value.dtype is not torch.bfloat16
        or value.device.type != "cpu"
        or value.dim() not in PACKED_DIMS
        or weight not in constants
        or (bias is not None and bias not in constants)
    ):
        return None
    node = convolution
    steps: list[tuple[Any, fx.Node]] = []
    while len(node.users) == 1:
        [user] = node.users
        if user.target is CONVERT and VALUE.of(user).dtype == value.dtype:
            return Affine(convolution, tuple(steps), user) if steps else None
        if user.target not in (CONVERT, *_ARITHMETIC) or user.kwargs:
            return None
        if VALUE.of(user).dtype is not torch.float32 or VALUE.of(user).shape != value.shape:
            return None
        if user.target is not CONVERT:
            left, right = cast("tuple[Any, Any]", user.args)
            other = right if left is node else left
            is_swapped = left is other and user.target not in _COMMUTATIVE
            if other not in constants or is_swapped or not _is_by_channel(other, value):
                return None
            steps.append((user.target, other))
        node = user
    return None


def _is_by_channel(constant: Any, value: torch.Tensor) -> bool:
    """Returns True if a constant has one number for each channel of a value."""
    shape = VALUE.of(constant).shape
    sizes = [1] * (value.dim() - len(shape)) + list(shape)
    by_channel = [1, value.size(1)] + [1] * (value.dim() - 2)
    return sizes == by_channel and VALUE.of(constant).dtype.is_floating_point


def _fold(affine: Affine) -> None:
    convolution, graph = affine.convolution, affine.result.graph

    call = functools.partial(add_call, graph)

    def exact(node: fx.Node) -> fx.Node:
        """Returns a float32 constant that was not rounded."""
        if node.target is CONVERT and VALUE.of(node.all_input_nodes[0]).dtype is torch.float32:
            return node.all_input_nodes[0]
        is_wide = VALUE.of(node).dtype is torch.float32
        return node if is_wide else call(CONVERT, node, torch.float32)

    x, weight, bias, *settings = cast("tuple[Any, ...]", convolution.args)
    with graph.inserting_before(affine.result):
        scaled, shift = exact(weight), bias if bias is None else exact(bias)
        by_weight = [-1] + [1] * (VALUE.of(weight).dim() - 1)
        for op, other in affine.steps:
            constant = call(aten.reshape.default, other, [-1])
            is_factor = op in (aten.mul.Tensor, aten.div.Tensor)
            if is_factor:
                scaled = call(op, scaled, call(aten.reshape.default, constant, by_weight))
            if shift is not None:
                shift = call(op, shift, constant)
            elif not is_factor:
                shift = constant if op is aten.add.Tensor else call(aten.neg.default, constant)
        low = call(CONVERT, scaled, VALUE.of(weight).dtype)
        folded = graph.call_function(aten.convolution.default, (x, low, shift, *settings))
    folded.meta = dict(convolution.meta)
    affine.result.replace_all_uses_with(folded)

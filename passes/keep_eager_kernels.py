"""Leaves ops to ATen's kernels where generated code rounds otherwise (``numerics="eager"``).

Before:
    %exp  = aten.exp.default(%x)                     # generated: one rounding off in float32
    %sum  = aten.sum.dim_IntList(%exp, [-1], True)   # generated: added in another order
    %y    = aten.div.Tensor(%exp, %sum)              # generated: the same bits
After: the same graph, with ``%exp`` and ``%sum`` marked for inductor, which calls ATen's kernels.

The graphs are AOTAutograd's. Ops that are made of others are kept whole by ``keeping_whole``, as a
softmax of exact parts is not ATen's softmax. Left alone on purpose: what moves elements without
computing any, what compares, integers, and devices other than the CPU, for which inductor's own
``numerics="strict"`` does the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.tables.generated import EXACT_POWERS, INEXACT, INEXACT_IN_FLOAT32, MOVES, SCALING
from amp_fx.torch_private.ops import OpOverload
from amp_fx.torch_private.pytree import tree_leaves
from amp_fx.torch_private.tensors import suggest_memory_format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

FALLBACK = "should_fallback"
"""Key of ``node.meta`` by which inductor calls an op's kernel instead of generating code."""


def keep_eager_kernels(graph: fx.Graph) -> int:
    """Marks the nodes that inductor must not generate code for; returns how many there are."""
    num_marked = 0
    for node in graph.nodes:
        if _is_whole(node) and needs_kernel(node.target, _arguments(node)):
            node.target = _OWN.get(node.target, node.target)
            node.meta[FALLBACK] = True
            _let_inductor_call(node.target)
            num_marked += 1
    return num_marked


@functools.cache
def _let_inductor_call(op: Any) -> None:
    """Registers the call of an op's kernel, if inductor only knows the op by its decomposition.

    Relies on ``make_fallback`` of ``torch._inductor.lowering``.
    """
    from amp_fx.torch_private.inductor import constrain_to_fx_strides, lowerings, make_fallback

    if op not in lowerings:
        make: Any = make_fallback
        make(op, constrain_to_fx_strides, warn=False, override_decomp=True)


def keeping_whole(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Any]:
    """Returns a table of decompositions that leaves ops whole whose kernels are needed.

    Relies on ``make_fx`` keeping an op whole whose decomposition returns ``NotImplemented``.
    """
    found = {op: _unless_needed(op, function) for op, function in decompositions.items()}
    return found | {_aten.native_dropout_backward.default: _dropout_backward}


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """As the gradient of eager code's ``x * (mask / (1 - p))`` rounds on the CPU."""
    return grad * (mask.to(grad.dtype) * scale)


def _unless_needed(op: Any, decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decompose_or_not(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not needs_kernel(op, leaves):
            return decompose(*args, **kwargs)
        is_mixed = len({x.dtype for x in leaves if _is_float(x)}) > 1
        own = NORMS.get(op) if is_mixed else GRADIENTS.get(op)
        return NotImplemented if own is None else own(*args, **kwargs)

    return decompose_or_not


def _norm_of_mixed_dtypes(op: Any) -> Any:
    """The op of a normalisation, with statistics in float32 where the input is low.

    ATen's CPU kernels give them so if weights are in float32; torch's fake kernels do not know.
    The same holds for gradients of weights.
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        first, *others = op(*args, **kwargs)
        first = None if first is None else first.to(args[0].dtype)
        return first, *(None if each is None else each.float() for each in others)

    return _own_op(op, fake)


def _laid_out_as_product(*args: Any) -> torch.Tensor:
    """An elementwise result of a gradient and a tensor, laid out as elementwise kernels do it."""
    grad, other = (each for each in args if isinstance(each, torch.Tensor))
    return grad * other


def _batch_norm_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of a batch norm; that of the input is in the input's own memory format."""
    grad, *others = _aten.native_batch_norm_backward.default(*args)
    return grad.contiguous(memory_format=suggest_memory_format(args[1])), *others


def _own_op(op: Any, fake: Callable[..., Any]) -> Any:
    """An op of ours that calls one of ATen's."""
    schema = str(op._schema).removeprefix("aten::").replace(f".{op._overloadname}(", "(")
    name = schema.partition("(")[0]
    _library.define(schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    _library.impl(name, call, "CPU")
    torch.library.register_fake(f"amp_fx::{name}", fake, lib=_library)
    return getattr(torch.ops.amp_fx, name).default


_library: Any = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_aten = torch.ops.aten
NORMS = {
    op: _norm_of_mixed_dtypes(op)
    for op in (
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten._native_batch_norm_legit_no_training.default,
    )
}
"""What stands for ATen's normalisations of a low input with weights in float32."""

GRADIENTS = {
    op: _own_op(op, _laid_out_as_product)
    for op in (
        _aten.elu_backward.default,
        _aten.hardsigmoid_backward.default,
        _aten.hardswish_backward.default,
        _aten.hardtanh_backward.default,
        _aten.logit_backward.default,
        _aten.softplus_backward.default,
    )
}
_batch_norm_backward = _aten.native_batch_norm_backward.default
GRADIENTS[_batch_norm_backward] = _own_op(_batch_norm_backward, _batch_norm_gradients)
NORMS[_batch_norm_backward] = GRADIENTS[_batch_norm_backward]
"""What stands for ops of which torch's fake kernels say other strides than their kernels give."""

_index_put = _own_op(_aten.index_put.default, _aten.index_put.default)
_OWN = dict.fromkeys((_aten.index_put.default, _aten._unsafe_index_put.default), _index_put)
"""What stands for ops that inductor would make to write in place, and forget that they do."""


def needs_kernel(op: Any, arguments: Sequence[Any]) -> bool:
    """Returns True if only ATen's kernel of an op gives ATen's bits on the CPU."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    floats = list(filter(_is_float, tensors))
    if not floats or any(each.device.type != "cpu" for each in tensors) or _is_view(op):
        return False
    name = op._schema.name.removeprefix("aten::")
    if name in MOVES or torch.Tag.nondeterministic_seeded in op.tags:  # ``fallback_random`` does
        return False
    if torch.Tag.pointwise not in op.tags or name in INEXACT or name.startswith("special_"):
        return True
    if any(each.dtype.itemsize > 2 for each in floats):
        return name in INEXACT_IN_FLOAT32 or _has_inexact_number(name, arguments, torch.float32)
    return _has_inexact_number(name, arguments, floats[0].dtype)


def _has_inexact_number(name: str, arguments: Sequence[Any], dtype: torch.dtype) -> bool:
    """Returns True if generated code rounds a number among an op's arguments otherwise."""
    numbers = [each for each in arguments if isinstance(each, (int, float))]
    if name == "pow":
        return not numbers or numbers[-1] not in EXACT_POWERS
    if any(isinstance(each, str) for each in arguments) or (name == "round" and numbers):
        return True  # a mode of rounding
    if name in ("add", "sub", "rsub") and len(arguments) > 2 and arguments[2] not in (1, -1):
        return True  # the last of three numbers or tensors is ``alpha``
    if dtype.itemsize > 2:
        return False
    is_number = any(isinstance(each, torch.Tensor) and each.dim() == 0 for each in arguments)
    if is_number and name in SCALING:
        return True
    return any(float(torch.tensor(n, dtype=dtype)) != n for n in numbers)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _is_view(op: OpOverload) -> bool:
    return any(each.alias_info is not None for each in op._schema.returns)


def _is_whole(node: fx.Node) -> bool:
    """Returns True if a node is an op of the program, and no part of one that was found exact.

    Metadata is copied, ops with it, hence the names. An op that takes the place of another one, as
    of a sum with 0, takes over its metadata: the other one must be one that is taken apart.
    """
    if node.op != "call_function":
        return False
    made_of = str(node.meta.get("original_aten", node.target))
    return made_of == str(node.target) or made_of not in _taken_apart()


@functools.cache
def _taken_apart() -> frozenset[str]:
    from amp_fx.torch_private.inductor import decompositions

    return frozenset(map(str, decompositions)) - {"aten.add.Tensor"}  # of complex numbers


def _arguments(node: fx.Node) -> list[Any]:
    leaves = tree_leaves((node.args, node.kwargs))
    return [each.meta.get("val") if isinstance(each, torch.fx.Node) else each for each in leaves]

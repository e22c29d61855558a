"""Calls ATen's kernels for ops that generated code rounds differently (``numerics="eager"``).

Before:
    %exp  = aten.exp.default(%x)                     # generated code: other bits in float32
    %sum  = aten.sum.dim_IntList(%exp, [-1], True)   # generated code: another order of additions
    %y    = aten.div.Tensor(%exp, %sum)              # generated code: the same bits
After: the same graph; inductor calls ATen's kernels for ``%exp`` and ``%sum``, which are marked.

Left unchanged: ops that only move elements or compare; integer ops; devices other than the CPU, for
which inductor's own ``numerics="strict"`` does the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult
from amp_fx.tables.generated import (
    EXACT_POWERS,
    INEXACT,
    INEXACT_IN_FLOAT32,
    MOVES,
    SCALING,
    SEQUENCES,
)
from amp_fx.torch_private.ops import OpOverload, returns_alias, without_decompositions
from amp_fx.torch_private.pytree import tree_leaves, tree_map
from amp_fx.torch_private.tensors import suggest_memory_format

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from amp_fx.graphs.conditions import Condition

FALLBACK = "should_fallback"
"""Key of ``node.meta`` that makes inductor call an op's kernel instead of generating code."""


@dataclasses.dataclass(frozen=True)
class KeepEagerKernels:
    """Marks nodes for which inductor must call ATen's kernels."""

    name: ClassVar[str] = "keep_eager_kernels"
    is_needed: ClassVar[bool] = True
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``kept_kernels``."""
        from amp_fx.torch_private.inductor import fall_back_where

        counts: Counter[str] = Counter()
        for node in [node for graph in graphs_in(gm) for node in graph.nodes]:
            if _is_original_op(node) and needs_kernel(node.target, _arguments(node)):
                node.target = _REPLACEMENTS.get(node.target, node.target)
                node.meta[FALLBACK] = True
                fall_back_where(FALLBACK, node.target)
                counts["kept_kernels"] += 1
        return PassResult(counts)


def exact_decompositions(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Any]:
    """Returns a decomposition table that does not decompose ops whose kernels are needed.

    A softmax that is decomposed into exact ops does not have the bits of ATen's softmax. Relies on
    ``make_fx`` not decomposing an op whose decomposition returns ``NotImplemented``.
    """
    table = {op: _decompose_unless_needed(op, function) for op, function in decompositions.items()}
    return table | {_aten.native_dropout_backward.default: _dropout_backward}


_EARLY = """
    hardshrink multi_margin_loss multilabel_margin_loss_forward softshrink upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_trilinear3d
"""
"""Inexact ops that torch decomposes by Python kernels, before any table of decompositions."""


def without_early_decompositions() -> contextlib.AbstractContextManager[None]:
    """Context in which tracing leaves the ops in ``_EARLY`` to the decomposition table."""
    packets = [getattr(_aten, name) for name in _EARLY.split()]
    return without_decompositions([getattr(p, name) for p in packets for name in p.overloads()])


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Rounds like the gradient of ``x * (mask / (1 - p))`` in eager code on the CPU."""
    return grad * (mask.to(grad.dtype) * scale)


def _decompose_unless_needed(op: Any, decompose: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_decompose(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not needs_kernel(op, leaves):
            return decompose(*args, **kwargs)
        is_mixed = len({x.dtype for x in leaves if _is_float(x)}) > 1
        replacement = NORMS.get(op) if is_mixed else RESTRIDED.get(op)
        return NotImplemented if replacement is None else replacement(*args, **kwargs)

    return maybe_decompose


def _norm_of_mixed_dtypes(op: Any) -> Any:
    """Wraps a normalization in an op whose fake kernel returns float32 statistics.

    If the input is low and the weights are float32, ATen's CPU kernels return float32 statistics
    and gradients of weights. The fake kernels in torch return the dtype of the input.
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        first, *others = without_mixture(*args, **kwargs)
        first = None if first is None else first.to(args[0].dtype)
        return first, *(None if value is None else value.float() for value in others)

    without_mixture = _FAKES.get(op, op)
    return _wrap_op(op, fake)


def _fake_elementwise_gradient(*args: Any) -> torch.Tensor:
    """Fake kernel of an elementwise gradient, with the strides of elementwise kernels."""
    grad, other = (value for value in args if isinstance(value, torch.Tensor))
    return grad * other


def _fake_reversed_gradient(*args: Any) -> torch.Tensor:
    """Fake kernel of an elementwise gradient that ATen's kernel reads last."""
    grad, other = (value for value in args if isinstance(value, torch.Tensor))
    return other * grad


def _fake_batch_norm(op: Any, position: int) -> Callable[..., Any]:
    """Returns a fake kernel whose first result has the memory format of the batch norm's input.

    Args:
        op: A batch norm or its gradient.
        position: The position of the input among the arguments.
    """

    def fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        first, *others = op(*args, **kwargs)
        return first.contiguous(memory_format=suggest_memory_format(args[position])), *others

    return fake


def _fake_contiguous(op: Any) -> Callable[..., Any]:
    """Returns a fake kernel with contiguous results."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        return tree_map(lambda value: None if value is None else value.contiguous(), results)

    return fake


def _wrap_op(op: Any, fake: Callable[..., Any], suffix: str = "") -> Any:
    """Registers an op of amp_fx that calls an op of ATen but has another fake kernel."""
    schema = str(op._schema).removeprefix("aten::").replace(f".{op._overloadname}(", "(")
    name, parenthesis, rest = schema.partition("(")
    name += suffix
    _library.define(name + parenthesis + rest)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    _library.impl(name, call, "CPU")
    torch.library.register_fake(f"amp_fx::{name}", fake, lib=_library)
    return getattr(torch.ops.amp_fx, name).default


_library: Any = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_aten = torch.ops.aten
_batch_norm_backward = _aten.native_batch_norm_backward.default
_BATCH_NORMS = (
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default,
)
_FAKES: dict[Any, Callable[..., Any]] = {
    **{op: _fake_batch_norm(op, 0) for op in _BATCH_NORMS},
    _batch_norm_backward: _fake_batch_norm(_batch_norm_backward, 1),
    **dict.fromkeys(
        (
            _aten.elu_backward.default,
            _aten.hardsigmoid_backward.default,
            _aten.hardswish_backward.default,
            _aten.hardtanh_backward.default,
            _aten.logit_backward.default,
            _aten.softplus_backward.default,
            _aten.xlogy.Tensor,
        ),
        _fake_elementwise_gradient,
    ),
    _aten.leaky_relu_backward.default: _fake_reversed_gradient,
    _aten.threshold_backward.default: _fake_reversed_gradient,
    **{
        op: _fake_contiguous(op)
        for op in (
            _aten.glu_backward.default,
            _aten.huber_loss_backward.default,
            _aten.log_sigmoid_forward.default,
            _aten.mse_loss_backward.default,
            _aten.native_layer_norm_backward.default,
        )
    },
}
NORMS = {
    op: _norm_of_mixed_dtypes(op)
    for op in (
        *_BATCH_NORMS,
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
    )
}
"""Replacements of ATen's normalizations for a low input with float32 weights."""

RESTRIDED = {
    op: _wrap_op(op, fake, "_restrided" if op in NORMS else "") for op, fake in _FAKES.items()
}
"""Replacements of ops whose fake kernels in torch return other strides than their real kernels."""
NORMS[_batch_norm_backward] = RESTRIDED[_batch_norm_backward]

_index_put = _wrap_op(_aten.index_put.default, _aten.index_put.default)
_REPLACEMENTS = dict.fromkeys(
    (_aten.index_put.default, _aten._unsafe_index_put.default), _index_put
)
"""Replacements of ops that inductor would make in-place without tracking the write."""


def needs_kernel(op: Any, arguments: Sequence[Any]) -> bool:
    """Returns True if code that inductor generates for an op on the CPU may return other bits."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    floats = list(filter(_is_float, tensors))
    name = op._schema.name.removeprefix("aten::")
    if not tensors:
        is_inexact = name in SEQUENCES or (name == "arange" and _has_float(arguments))
        return is_inexact and all(_device_type(value) in (None, "cpu") for value in arguments)
    if not floats or any(value.device.type != "cpu" for value in tensors) or returns_alias(op):
        return False
    if name in MOVES or torch.Tag.nondeterministic_seeded in op.tags:  # ``fallback_random`` does
        return False
    if torch.Tag.pointwise not in op.tags or name in INEXACT or name.startswith("special_"):
        return True
    if any(value.is_complex() for value in floats):  # decompositions round other steps
        return True
    floats = [value for value in floats if value.dim()] or floats  # the others do not promote
    if any(value.dtype.itemsize > 2 for value in floats):
        return name in INEXACT_IN_FLOAT32 or _has_inexact_number(name, arguments, torch.float32)
    return _has_inexact_number(name, arguments, floats[0].dtype)


def _has_inexact_number(name: str, arguments: Sequence[Any], dtype: torch.dtype) -> bool:
    """Returns True if generated code rounds a number among an op's arguments differently."""
    numbers = [value for value in arguments if isinstance(value, (int, float))]
    if name == "pow":
        return not numbers or numbers[-1] not in EXACT_POWERS
    if any(isinstance(value, str) for value in arguments) or (name == "round" and numbers):
        return True  # a rounding mode
    if name in ("add", "sub", "rsub") and len(arguments) > 2 and arguments[2] not in (1, -1):
        return True  # the third argument is ``alpha``
    if dtype.itemsize > 2:
        return False
    scalars = [v.dtype for v in arguments if isinstance(v, torch.Tensor) and v.dim() == 0]
    if scalars and (name in SCALING or set(scalars) != {dtype}):
        return True
    return any(float(torch.tensor(n, dtype=dtype)) != n for n in numbers)


def _has_float(arguments: Sequence[Any]) -> bool:
    return any(isinstance(value, float | torch.SymFloat) for value in arguments)


def _device_type(value: Any) -> str | None:
    return value.type if isinstance(value, torch.device) else None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _is_original_op(node: fx.Node) -> bool:
    """Returns True if a node is an op of the program, not part of a decomposition.

    Decompositions are only applied if they are exact. Ops are compared by name, because copies of
    metadata copy the ops. An op that replaces another op, such as a sum with 0, inherits its
    metadata. So a node is only part of a decomposition if inductor decomposes the op in its
    metadata.
    """
    if node.op != "call_function":
        return False
    original = str(node.meta.get("original_aten", node.target))
    return original == str(node.target) or original not in _decomposed_ops()


@functools.cache
def _decomposed_ops() -> frozenset[str]:
    from amp_fx.torch_private.inductor import decompositions

    return frozenset(map(str, decompositions)) - {"aten.add.Tensor"}  # of complex numbers


def _arguments(node: fx.Node) -> list[Any]:
    leaves = tree_leaves((node.args, node.kwargs))
    return [
        value.meta.get("val") if isinstance(value, torch.fx.Node) else value for value in leaves
    ]

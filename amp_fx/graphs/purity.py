"""Determines whether nodes are pure: their results depend on their arguments only.

A value computed from weights may only be cached if all nodes that compute it are pure. A node must
run in every call if it draws random numbers, reads a tensor that is not an argument, or has side
effects. The dispatcher does not know what a kernel does, so ops outside of PyTorch and amp_fx only
count as pure if they are registered (``register_pure_op``).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import PolicyError
from amp_fx.graphs.values import is_unbacked, recorded_value, tensors_in
from amp_fx.policies.calls import qualified_name
from amp_fx.policies.changes import expand_ops
from amp_fx.tables.op_names import op_text
from amp_fx.torch_private.ops import OpOverload, OpOverloadPacket, is_impure

if TYPE_CHECKING:
    from torch import fx

TRUSTED_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "amp_fx",
        "mkldnn",  # packed weights of oneDNN
        "onednn",  # packed int8 weights of oneDNN
        "quantized_decomposed",  # ops that torch.ao inserts
    }
)
"""Namespaces whose ops are pure unless their schema, their tags or ``_IMPURE`` says otherwise."""

_UNINITIALIZED = "its result is uninitialized memory"
_STATISTICS = "in training it writes running statistics that its schema does not mark"
_ORDERED = "it performs a check, or orders checks"

_IMPURE = {
    "aten::_ctc_loss": "parts of its second result are uninitialized memory",
    "aten::_empty_affine_quantized": _UNINITIALIZED,
    "aten::_empty_per_channel_affine_quantized": _UNINITIALIZED,
    "aten::empty": _UNINITIALIZED,
    "aten::empty_like": _UNINITIALIZED,
    "aten::empty_permuted": _UNINITIALIZED,
    "aten::empty_quantized": _UNINITIALIZED,
    "aten::empty_strided": _UNINITIALIZED,
    "aten::new_empty": _UNINITIALIZED,
    "aten::new_empty_strided": _UNINITIALIZED,
    "aten::resize": _UNINITIALIZED,
    "aten::resize_as": _UNINITIALIZED,
    "prims::empty": _UNINITIALIZED,
    "prims::empty_permuted": _UNINITIALIZED,
    "prims::empty_strided": _UNINITIALIZED,
    "aten::from_file": "the file may change",
    "aten::batch_norm": _STATISTICS,
    "aten::cudnn_batch_norm": _STATISTICS,
    "aten::instance_norm": _STATISTICS,
    "aten::miopen_batch_norm": _STATISTICS,
    "aten::native_batch_norm": _STATISTICS,
    "aten::_functional_assert_async": _ORDERED,
    "aten::_functional_assert_scalar": _ORDERED,
    "aten::_functional_sym_constrain_range": _ORDERED,
    "aten::_functional_sym_constrain_range_for_size": _ORDERED,
    "aten::_make_dep_token": _ORDERED,
    "prims::_make_token": _ORDERED,
}
"""Impure ops of trusted namespaces without a schema or tag that shows it, with the reason."""

_registered: set[str] = set()


def is_pure(node: fx.Node) -> bool:
    """Returns True if a node computes tensors from its arguments alone and has no side effects.

    The nodes that compute the arguments do not matter. Returns False for placeholders, attributes,
    outputs, higher-order ops, Triton kernels, Python functions and methods, ops that return numbers
    (``item``), and results whose shape depends on data (``nonzero``, or a mask as an index).

    Args:
        node: A node of a graph of AOTAutograd, or any node whose target is an op.
    """
    if node.op != "call_function":
        return False
    overloads = _overloads_of(node.target)
    # ``getitem`` reads one result of an op with several, and is the only function of Python that
    # may compute a cached value.
    if node.target is not operator.getitem and not overloads:
        return False
    return all(map(is_pure_op, overloads)) and not _has_shape_of_data(node, overloads)


def is_pure_op(op: OpOverload) -> bool:
    """Returns True if an op is pure for all arguments.

    Ops with data-dependent shapes count as pure, because the shape of a specific call may be fixed.
    """
    name = qualified_name(op)
    is_trusted = op.namespace in TRUSTED_NAMESPACES or name in _registered
    return is_trusted and not why_impure(op)


def why_impure(op: OpOverload) -> str:
    """Returns the reason why an op is impure; empty if no reason is known."""
    schema = op._schema
    if schema.is_mutable:
        return "it writes to its arguments"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "it draws random numbers"
    if not schema.returns or not all(str(result.type) in _TENSORS for result in schema.returns):
        return "it does not return tensors"
    if is_impure(op):  # ``torch.library`` forbids to eliminate calls of it
        return "torch lists it as having side effects"
    return _IMPURE.get(op._schema.name, "")


_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]")


def _overloads_of(target: Any) -> list[OpOverload]:
    """Returns the overloads that a target may call. Inductor's patterns insert packets."""
    if isinstance(target, OpOverload):
        return [target]
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return []


def _has_shape_of_data(node: fx.Node, overloads: list[OpOverload]) -> bool:
    value = recorded_value(node)
    # The tags of an op say that its shape may depend on data; a value says whether it does.
    if value is None:
        return any(torch.Tag.dynamic_output_shape in op.tags for op in overloads)
    return any(is_unbacked(tuple(t.shape)) for t in tensors_in(value))


def register_pure_op(op: Any) -> None:
    """Registers a custom op as pure: its results depend on its arguments only.

    If the arguments of the op are weights, amp_fx then computes its result once per update and
    caches it, as for PyTorch's ops. Other custom ops run in every call, because their kernels may
    read tensors or numbers that are not arguments, draw random numbers, or have side effects.
    Register the op before code that uses it is compiled::

        @torch.library.custom_op("mylib::unpack", mutates_args=())
        def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor: ...

        amp_fx.register_pure_op(unpack)

    Args:
        op: The op or its name: ``"mylib::unpack"`` for all overloads that do not write to their
            arguments, ``"mylib::unpack.overload"`` for one of them, or ``"mylib::*"`` for all ops
            that a library has defined so far.

    Raises:
        PolicyError: The op does not exist or is impure: it writes to its arguments, is tagged as
            random, does not return tensors, or is registered as having side effects.
    """
    names = expand_ops(op_text(op))
    for name in names:
        packet, _, overload = name.partition(".")
        namespace, _, short = packet.partition("::")
        overloads = getattr(getattr(torch.ops, namespace), short)
        reason = why_impure(getattr(overloads, overload or "default"))
        if reason:
            raise PolicyError(f"{name} cannot be registered as pure: {reason}")
    # At the end, so that an error registers none of the ops.
    _registered.update(names)

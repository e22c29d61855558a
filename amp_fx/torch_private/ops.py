"""Operators, their schemas, and the dispatcher's kernels for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._library.custom_ops import CustomOpDef
from torch._library.utils import is_impure
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from amp_fx.replaced import replaced

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

__all__ = ("CustomOpDef", "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "is_impure")

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard


def all_op_names() -> list[str]:
    """Returns the names of all registered ops, such as ``"aten::add.Tensor"``."""
    return torch._C._dispatch_get_all_op_names()


def schema_of(name: str, overload: str) -> torch.FunctionSchema:
    """Returns the schema of an overload, such as ``"aten::add"`` and ``"Tensor"``.

    Raises:
        RuntimeError: The overload does not exist.
    """
    return torch._C._get_schema(name, overload)


has_kernels = torch._C._dispatch_has_kernel
"""Returns True if an op with this name has a kernel or a schema."""
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
"""Returns True if an op has a kernel for a dispatch key; fallbacks do not count."""


def ops_with_kernel_for(key: str) -> list[str]:
    """Returns the names of all ops that have a kernel for a dispatch key."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def has_backend_fallback(key: torch._C.DispatchKey) -> bool:
    """Returns True if a dispatch key has a fallback kernel for ops without a kernel."""
    return torch._C._dispatch_has_backend_fallback(key)


def keyset_full_after(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Returns all dispatch keys after a key."""
    return torch._C._dispatch_keyset_full_after(key)


def returns_alias(op: OpOverload) -> bool:
    """Returns True if a result of an op may alias an argument, as of views and in-place ops."""
    return any(result.alias_info is not None for result in op._schema.returns)


def without_decompositions(ops: Sequence[OpOverload]) -> contextlib.AbstractContextManager[None]:
    """Context in which tracing leaves ops to the decomposition table.

    Relies on ``OpOverload.py_kernels``, decompositions that the dispatcher prefers while a graph is
    traced, and on ``_dispatch_cache``, which contains what it found before.
    """
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    kernels = [{k: v for k, v in op.py_kernels.items() if k not in keys} for op in ops]
    return replaced(
        *((op, "py_kernels", others) for op, others in zip(ops, kernels, strict=True)),
        *((op, "_dispatch_cache", {}) for op in ops),
    )

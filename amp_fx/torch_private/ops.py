"""Operators, their schemas, and the dispatcher's kernels for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

if TYPE_CHECKING:
    import contextlib

__all__ = ("CustomOpDef", "HigherOrderOperator", "OpOverload", "OpOverloadPacket")

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard


def all_op_names() -> list[str]:
    """Returns the names of all registered ops, as ``"aten::add.Tensor"``."""
    return torch._C._dispatch_get_all_op_names()


def schema_of(name: str, overload: str) -> torch.FunctionSchema:
    """Returns the schema of ``"aten::add"`` and ``"Tensor"``; RuntimeError if there is none."""
    return torch._C._get_schema(name, overload)


def has_kernels(name: str) -> bool:
    """Returns True if an op of this name has any kernel, or a schema without one."""
    return torch._C._dispatch_has_kernel(name)


def has_kernel_for(name: str, key: str) -> bool:
    """Returns True if an op has a kernel of its own for the dispatch key of that name."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def registrations_for(key: str) -> list[str]:
    """Returns the names of the ops that have a kernel for a dispatch key."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def has_backend_fallback(key: torch._C.DispatchKey) -> bool:
    """Returns True if a dispatch key has a kernel for all ops without one of their own."""
    return torch._C._dispatch_has_backend_fallback(key)


def keyset_full_after(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Returns all dispatch keys that come after one."""
    return torch._C._dispatch_keyset_full_after(key)


def scoped_library(namespace: str, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Context manager: a ``torch.library.Library`` whose registrations end with it."""
    return torch.library._scoped_library(namespace, kind)


def is_impure(op: OpOverload) -> bool:
    """Returns True if ``torch.library`` says that calls of an op must not be left out."""
    from torch._library.utils import is_impure as is_impure_op

    return is_impure_op(op)

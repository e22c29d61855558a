"""Autocast kernels of registered ops and devices, and of other libraries' ops.

``torch.autocast`` consists of one kernel per op on the dispatch key ``Autocast*`` of each device
type. ``register_op`` and ``register_device`` add such kernels for ops and devices outside of
PyTorch. Existing kernels are never replaced.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.policies.calls import qualified_name, restore_results
from amp_fx.policies.policy import preset
from amp_fx.tables.kernels import opaque_result
from amp_fx.torch_private.ops import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    has_backend_fallback,
    has_kernel_for,
    keyset_full_after,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.torch_private.ops import OpOverload

_lock = threading.Lock()
_libraries: dict[tuple[str, str], torch.library.Library] = {}
"""Registrations of the kernels that this module added, by device type and op."""


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Returns True if another library registered an autocast kernel for a device type."""
    name = qualified_name(op)
    is_ours = (device_type, name) in _libraries
    return not is_ours and has_kernel_for(name, autocast_key(device_type))


def autocast_key(device_type: str) -> str:
    """Returns the name of a device type's autocast dispatch key, such as ``AutocastCUDA``."""
    return _AUTOCAST_KEYS.get(device_type, "AutocastPrivateUse1")


_AUTOCAST_KEYS = {
    name.lower(): f"Autocast{name}"
    for name in ("CPU", "CUDA", "XPU", "MPS", "XLA", "HPU", "IPU", "MTIA", "MAIA")
}


def add_kernels_of_op(name: str) -> None:
    """Adds the autocast kernels of all devices that a registered op lacks."""
    for device_type in preset("torch").tables:
        if hasattr(DispatchKey, autocast_key(device_type)):
            _add_kernel(name, device_type)


def add_kernels_of_device(device_type: str) -> None:
    """Adds the autocast kernels that a registered device lacks.

    PyTorch registers no kernels for an out-of-tree backend, and no fallthrough for other ops.
    """
    key = autocast_key(device_type)
    if not has_backend_fallback(getattr(DispatchKey, key)):
        library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        library.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
        _libraries[device_type, "fallback"] = library
    for name in sorted(preset("torch").tables[device_type]):
        _add_kernel(name, device_type)


def _add_kernel(name: str, device_type: str) -> None:
    op, key = find_op(name), autocast_key(device_type)
    with _lock:
        if op is None or has_kernel_for(name, key):
            return
        library = torch.library.Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]
        library.impl(op, _make_kernel(op, device_type, key), key, with_keyset=True)  # type: ignore[no-untyped-call]
        _libraries[device_type, qualified_name(op)] = library


def find_op(name: str) -> OpOverload | None:
    """Returns a registered functional op by its qualified overload name, or None."""
    qualified, _, overload = name.partition(".")
    namespace, _, packet = qualified.partition("::")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None
    return None if op._schema.is_mutable else op


def _make_kernel(op: OpOverload, device_type: str, key: str) -> Callable[..., Any]:
    dispatch_key = getattr(DispatchKey, key)
    autocast_keys = DispatchKeySet(dispatch_key)
    keys_below = keyset_full_after(dispatch_key)
    calls_others = op._can_decompose() or opaque_result(qualified_name(op), device_type) is not None

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        decision = preset("torch").resolver.decide((op, args, kwargs), device_type, ())
        if decision is None and calls_others:
            return op.redispatch(keyset & keys_below, *args, **kwargs)
        with ExcludeDispatchKeyGuard(autocast_keys):
            if decision is None:
                return op(*args, **kwargs)
            low_dtype = torch.get_autocast_dtype(device_type)
            call, restored_dtype = decision.apply((op, args, kwargs), device_type, low_dtype)
            return restore_results(call[0](*call[1], **call[2]), restored_dtype)

    return kernel

"""Makes a policy of the user's own hold in eager code.

``torch.autocast`` is a kernel per op on the Autocast dispatch keys. Where a policy treats an
op otherwise than PyTorch, a Python kernel takes that place: it asks which policy holds in the
calling thread, and does what ``calls.apply_policy`` says, or, where none holds, calls the
kernel that was there before. So composite ops, subclasses, autograd and nested regions see it
exactly as they see ``torch.autocast``. Ops that all policies treat as PyTorch does keep their
own kernels; a kernel once replaced stays replaced, because the dispatcher's tables must not
change while other threads use them.

Left alone on purpose: in-place and ``out=`` ops. The casts made here are not cached.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.csrc import load_kernels
from amp_fx.devices.float8 import warn_of_slowness
from amp_fx.policies.calls import qualified_name, restore_results
from amp_fx.policies.decide import is_adjustable
from amp_fx.policies.float8 import run_float8, weight_of, why_not_float8
from amp_fx.policies.policy import preset
from amp_fx.regions.cache_keys import put_policies_in_keys
from amp_fx.regions.module_stack import current_stack, is_linear_end
from amp_fx.regions.policy_codes import ambient_policy
from amp_fx.tables.kernels import opaque_result
from amp_fx.tables.op_names import all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

    from amp_fx.policies.calls import Call
    from amp_fx.policies.decide import Decision, Resolver
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.state import AutocastState

_lock = threading.Lock()
_prepared: set[tuple[object, str]] = set()
"""What policies say of ops, and device types: equal ones need the same kernels."""
_replaced: dict[tuple[str, str], Any] = {}
"""Per device type and op: what keeps the registration alive."""


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Whether a kernel is registered on the autocast key of a device type, by others than us."""
    if (device_type, qualified_name(op)) in added_kernels:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        qualified_name(op), autocast_key(device_type)
    )


added_kernels: set[tuple[str, str]] = set()
"""Device types and ops that have an autocast kernel only because this file gave one."""


def autocast_key(device_type: str) -> str:
    """The autocast dispatch key of a device type.

    Relies on dispatch keys being named ``Autocast`` plus the device's name.
    """
    return _AUTOCAST_KEYS.get(device_type, "AutocastPrivateUse1")


_AUTOCAST_KEYS = {
    name.lower(): f"Autocast{name}"
    for name in ("CPU", "CUDA", "XPU", "MPS", "XLA", "HPU", "IPU", "MTIA", "MAIA")
}


def prepare(policy: Policy, device_type: str) -> None:
    """Sees to it that eager regions with this policy run by it, in any thread.

    Args:
        policy: The policy.
        device_type: That of the region; regions inside of it may also be for the CPU, for CUDA
            or for the machine's accelerator. What holds for modules, and rules, needs a kernel
            for every op, which others of these have only if they are the accelerator.
    """
    if (policy.kernels_key, device_type) in _prepared:
        return
    accelerator = torch.accelerator.current_accelerator()
    devices = {device_type} | ({accelerator.type} if accelerator is not None else set())
    with _lock:
        for device, name in _differences(policy):
            if device in devices | {"cpu", "cuda"}:
                _prepare_op(name, device)
        for name in _adjustable_ops(all_ops()) if policy.resolver.depends_on_module else ():
            for device in devices:
                _prepare_op(name, device)
        _prepared.add((policy.kernels_key, device_type))


def prepare_state(state: AutocastState) -> None:
    """Does so for code that will run in this state: an island, a graph that is not rewritten."""
    if state.policy is not None:
        for device_type in state.enabled:
            prepare(state.policy, device_type)


def prepare_op(name: str) -> None:
    """Gives eager autocast of all devices a kernel for a registered op."""
    with _lock:
        for device_type in preset("torch").tables:
            if hasattr(torch._C.DispatchKey, autocast_key(device_type)):
                _prepare_op(name, device_type)


def _prepare_op(name: str, device_type: str) -> None:
    if (device_type, name) in _replaced:
        return
    op = _find_op(name)
    if op is not None:
        _replaced[device_type, name] = _replace(op, device_type)


@functools.lru_cache(maxsize=1)
def _adjustable_ops(names: frozenset[str]) -> tuple[str, ...]:
    """The ops that a module's policy or a rule is asked about, PyTorch's and other libraries'."""
    found = ((name, _find_op(name)) for name in sorted(names))
    return tuple(name for name, op in found if op is not None and is_adjustable(op))


def prepare_device(device_type: str) -> None:
    """Gives eager ``torch.autocast`` of a registered device the kernels that it lacks.

    PyTorch registers none for a backend outside of it, and does not let other ops pass
    either; what the backend brings stays.
    """
    with _lock:
        key = autocast_key(device_type)
        if not torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)):
            library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            library.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
            _replaced[device_type, "every other op"] = library
        for name in sorted(preset("torch").tables[device_type]):
            op = _find_op(name)
            if op is None or (device_type, name) in _replaced:
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                _replaced[device_type, name] = _replace(op, device_type)


def _differences(policy: Policy) -> Iterator[tuple[str, str]]:
    """Lists the ops that a policy treats differently than torch, wherever they run."""
    default = preset("torch").tables
    changed_args = {op for override in policy.args for op in override.overloads}
    for device_type in {*policy.tables, *default}:
        ours, theirs = policy.tables.get(device_type, {}), default.get(device_type, {})
        for name in sorted({*ours, *theirs, *changed_args}):
            if ours.get(name) is not theirs.get(name) or name in changed_args:
                yield device_type, name


def _find_op(name: str) -> OpOverload | None:
    """A registered functional op by its qualified overload name, or None."""
    qualified, _, overload = name.partition(".")
    namespace, _, packet = qualified.partition("::")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None
    return None if op._schema.is_mutable else op


def _replace(op: OpOverload, device_type: str) -> torch.library.Library:
    key = autocast_key(device_type)
    before = _kernel_before(op, key)
    if before is None:
        added_kernels.add((device_type, str(op.name())))  # type: ignore[no-untyped-call]
    library = torch.library.Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        kernel = _make_kernel(op, device_type, key, before)
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _kernel_before(op: OpOverload, key: str) -> Callable[..., Any] | None:
    """Calls the kernel of an op on an autocast key, which outlives its replacement, if any.

    The kernel may wait for the mutex of the cache of casts, whose holder may wait for the GIL:
    other threads need it let go of (``csrc/kernels.cpp``).
    """
    name: str = op.name()  # type: ignore[no-untyped-call]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    return _without_gil(op, key) or torch.library.get_kernel(name, key).call_boxed


def _without_gil(op: OpOverload, key: str) -> Callable[..., Any] | None:
    """Calls the kernel of an op on an autocast key, which is still to be replaced."""
    standby, kernels = _STANDBY.get(key), load_kernels()
    if standby is None or kernels is None:
        return None
    autocast_key, standby_key = (getattr(torch._C.DispatchKey, each) for each in (key, standby))
    schema = op._schema
    kernels.keep(schema.name, schema.overload_name, int(autocast_key), int(standby_key))
    keys = torch._C.DispatchKeySet(standby_key)

    def call(_: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys, *args, **kwargs)

    return call


_STANDBY = {
    "AutocastCPU": "AutogradIPU",
    "AutocastCUDA": "SparseIPU",
    "AutocastXPU": "QuantizedIPU",
    "AutocastMPS": "IPU",
    "AutocastHPU": "NestedTensorIPU",
    "AutocastPrivateUse1": "SparseCsrIPU",
}
"""Dispatch keys of a device that no package has ever offered: kernels that were replaced wait
there to be called."""


def _make_kernel(op: OpOverload, device_type: str, key: str, before: Any) -> Callable[..., Any]:
    dispatch_key = getattr(torch._C.DispatchKey, key)
    own_key = torch._C.DispatchKeySet(dispatch_key)
    keys_below = torch._C._dispatch_keyset_full_after(dispatch_key)
    is_opaque = opaque_result(qualified_name(op), device_type) is not None
    calls_others = op._can_decompose() or is_opaque

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = (op, args, kwargs)
        policy = ambient_policy()
        default = preset("torch").resolver.decide(call, device_type, ())
        decision = default if policy is None else _decide(policy.resolver, call, device_type)
        is_default = _what(decision) == _what(default)
        if is_default and before is not None and not _has_number(op, args):
            return before(keyset, *args, **kwargs)
        if decision is None and calls_others:
            return _redispatch(op, keyset & keys_below, args, kwargs)
        restored_dtype = None
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            if decision is not None:
                low_dtype = torch.get_autocast_dtype(device_type)
                lowered, restored_dtype = decision.apply(call, device_type, low_dtype)
                if policy is not None and decision.is_float8(op):
                    return _run_float8(call, lowered, low_dtype, decision, policy)
                call = lowered
            return restore_results(call[0](*call[1], **call[2]), restored_dtype)

    return kernel


def _decide(resolver: Resolver, call: Call, device_type: str) -> Decision | None:
    put_policies_in_keys()  # Dynamo may have been imported inside of the region
    stack = current_stack() if resolver.depends_on_module else ()
    return resolver.decide(call, device_type, stack)


def _run_float8(
    call: Call, lowered: Call, low_dtype: torch.dtype, decision: Decision, policy: Policy
) -> Any:
    """Runs a product in float8, if it fits and a leaf is its weight; else in the low dtype."""
    weight, has_rows = weight_of(call)
    is_end = decision.origin == "table" and weight is not None and is_linear_end(weight)
    if weight is None or is_end:
        return lowered[0](*lowered[1], **lowered[2])
    settings = policy.float8
    if why_not_float8(lowered, weight, low_dtype, settings, has_rows_of_outputs=has_rows):
        return lowered[0](*lowered[1], **lowered[2])
    if weight.device.type == "cpu":
        warn_of_slowness()
    return run_float8(lowered, weight, settings.recipe, has_rows_of_outputs=has_rows)


def _what(decision: Decision | None) -> object:
    """Returns what a decision does, whatever its origin."""
    return None if decision is None else (decision.policy, decision.args)


def _redispatch(
    op: OpOverload, keys: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls an op as if no kernel were here: the ops inside of it are still autocast.

    ``redispatch`` takes no numbers for tensors. Relies on ``decompose`` making tensors of them that
    count as numbers where types are promoted; all such ops that get here can be decomposed.
    """
    if _has_number(op, args):
        return op.decompose(*args, **kwargs)
    return op.redispatch(keys, *args, **kwargs)


def _has_number(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a number stands for a tensor, as in ``2 * x``: boxed calls do not take it."""
    return any(
        isinstance(value, (int, float, complex)) and "Tensor" in str(argument.type)
        for argument, value in zip(op._schema.arguments, args, strict=False)
    )

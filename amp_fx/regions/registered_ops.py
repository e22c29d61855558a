"""``register_op`` and ``register_device``: autocast for ops and devices outside of PyTorch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import as_dtype, dtype_name
from amp_fx.errors import OptionError, PolicyError
from amp_fx.policies.calls import castable_tensors, is_eligible, qualified_name, supports_policy
from amp_fx.policies.changes import arg_override, expand_ops, to_policy
from amp_fx.policies.policy import add_device
from amp_fx.regions.autocast_kernels import add_kernels_of_device, add_kernels_of_op
from amp_fx.tables.op_names import op_text
from amp_fx.tables.presets import device_table
from amp_fx.tables.registered import REGISTERED, RegisteredOp
from amp_fx.torch_private.autocast import privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.policies.changes import Treatment

log = logging.getLogger(__name__)


def register_op(op: Any, policy: Treatment, args: Mapping[str, Treatment] | None = None) -> None:
    """Registers the cast policy of a custom op for all devices, in eager and compiled code.

    The registration applies under ``torch.autocast`` and under every policy, like an entry of the
    tables. Overrides of a policy for the op or its module take precedence. Register an
    op once, next to its definition. If amp_fx has already warned about the op, all compiled code is
    recompiled.

    Args:
        op: The op or its name: ``"mylib::op"`` for all overloads that compute tensors, or
            ``"mylib::op.overload"`` for one of them.
        policy: A cast policy or its name.
        args: Treatments of single arguments, as in ``Policy.with_args``.

    Raises:
        PolicyError: The op, policy or argument does not exist; the policy does not apply to the op;
            the op belongs to PyTorch (use ``Policy.with_ops``); or the op is registered with
            another policy.
    """
    op = op_text(op)
    cast_policy = to_policy(f"op {op!r}", policy)
    names = tuple(n for n in expand_ops(op) if supports_policy(n, cast_policy))
    if not names:
        raise PolicyError(
            f"op {op!r} cannot be {cast_policy.value}: it computes no tensors from tensors"
        )
    entry = RegisteredOp(cast_policy, arg_override(op, args, ()).args if args else ())
    for name in names:
        _check(name, entry)
    REGISTERED.update(dict.fromkeys(names, entry))
    for name in names:
        add_kernels_of_op(name)
    if not _reported.isdisjoint(names):
        torch.compiler.reset()
        _reported.difference_update(names)


def _check(name: str, entry: RegisteredOp) -> None:
    if name.startswith("aten::"):
        raise PolicyError(
            f"{name} is an op of PyTorch, which cannot be registered: use Policy.with_ops to "
            "change how it is cast"
        )
    existing = REGISTERED.setdefault(name, entry)
    if existing != entry:
        raise PolicyError(
            f"{name} is already registered as {existing.policy.value} {dict(existing.args)}: use "
            "Policy.with_ops to change how it is cast"
        )


def report_mixture(call: Call, device_type: str) -> None:
    """Warns once if an op without a policy receives different floating-point dtypes."""
    name = qualified_name(call[0])
    if name.startswith(_OWN_NAMESPACES) or name in _reported:
        return
    tensors = [t for t in castable_tensors(call) if is_eligible(t, device_type)]
    dtypes = sorted({dtype_name(t.dtype) for t in tensors})
    if len(dtypes) < 2:
        return
    _reported.add(name)
    log.warning(
        "%s receives %s under autocast, which has no policy for it. Outside of regions, its inputs "
        "are cast back to the program's dtypes. If the op rejects these dtypes in a region, or if "
        'these casts cost too much, register its cast policy: amp_fx.register_op("%s", "fp32")  '
        '# or "lower_precision_fp", "promote", "keep"',
        name,
        " and ".join(dtypes),
        name,
    )


_OWN_NAMESPACES = ("aten::", "prims::", "prim::", "amp_fx::", "inductor::")
_reported: set[str] = set()


def register_device(
    device_type: str,
    dtypes: Sequence[torch.dtype | str] | None = None,
    table: Mapping[Any, Treatment] | None = None,
) -> None:
    """Enables autocast for a PrivateUse1 backend, in eager and compiled code.

    Adds a table for the device to every preset, and registers the autocast kernels that the backend
    lacks. Call it once, after the backend's package is imported, which calls
    ``torch.utils.rename_privateuse1_backend`` and ``torch._register_device_module``.

    Args:
        device_type: The name that was passed to ``rename_privateuse1_backend``.
        dtypes: Dtypes that the device can autocast to, or their names. They are also set as result
            of ``torch.<device_type>.get_amp_supported_dtype()``, which is the default.
        table: Cast policies by op, as in ``Policy.with_device``. Defaults to the lists that
            ``ATen/autocast_mode.h`` provides for new devices, and the ban of
            ``binary_cross_entropy``.

    Raises:
        OptionError: torch's PrivateUse1 backend has another name or no module yet, or ``dtypes`` is
            empty, contains other than floating-point dtypes, or is missing and the backend provides
            none.
        PolicyError: An entry of the table is not valid.
    """
    _check_name(device_type)
    _check_module(device_type)
    supported = _checked_dtypes(device_type, dtypes)
    add_device(device_type, device_table() if table is None else table)
    if dtypes is not None:
        getattr(torch, device_type).get_amp_supported_dtype = lambda: list(supported)
    add_kernels_of_device(device_type)


def _check_name(device_type: object) -> None:
    name = privateuse1_name()
    if device_type == name:
        return
    raise OptionError(
        f"{device_type!r} is not the name of torch's PrivateUse1 backend, which is {name!r}: call "
        "torch.utils.rename_privateuse1_backend first. To replace the table of a built-in device, "
        "use amp_fx.Policy.with_device"
    )


def _check_module(device_type: str) -> None:
    """Raises an error unless the backend has registered its module.

    A module that amp_fx created would keep the backend from registering its own, and torch calls
    functions of it that only the backend can provide, such as ``is_available``.
    """
    if not hasattr(torch, device_type):
        raise OptionError(
            f"torch.{device_type} does not exist yet: import the backend's package first, or "
            "register a module (torch._register_device_module)"
        )


def _checked_dtypes(
    device_type: str, dtypes: Sequence[torch.dtype | str] | None
) -> list[torch.dtype]:
    if dtypes is None:
        supported = getattr(getattr(torch, device_type, None), "get_amp_supported_dtype", None)
        if supported is None:
            raise OptionError(
                f"torch.{device_type}.get_amp_supported_dtype() does not exist: pass dtypes, "
                "or define this function"
            )
        dtypes = supported()
    names = list(dtypes)
    parsed = [dtype for dtype in map(as_dtype, names) if dtype is not None]
    is_valid = len(parsed) == len(names) and all(d.is_floating_point for d in parsed)
    if not parsed or not is_valid:
        raise OptionError(
            f"dtypes must be floating-point dtypes to autocast to, such as "
            f"[torch.bfloat16, torch.float16]; got {names!r}"
        )
    return parsed

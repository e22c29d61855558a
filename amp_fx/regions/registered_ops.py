"""``register_op`` and ``register_device``: autocast for ops and devices outside of PyTorch."""

from __future__ import annotations

import logging
import types
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import as_dtype, dtype_name
from amp_fx.errors import OptionError, PolicyError
from amp_fx.policies.calls import castable_tensors, is_eligible, qualified_name, takes_policy
from amp_fx.policies.changes import arg_override, expand_ops, to_policy
from amp_fx.policies.policy import add_device
from amp_fx.regions.autocast_kernels import add_kernels_of_device, add_kernels_of_op
from amp_fx.tables.op_names import op_text
from amp_fx.tables.registered import REGISTERED, RegisteredOp
from amp_fx.torch_private.autocast import privateuse1_name, register_device_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.policies.changes import Treatment
    from amp_fx.tables.cast_policy import Table

log = logging.getLogger(__name__)


def register_op(op: Any, policy: Treatment, args: Mapping[str, Treatment] | None = None) -> None:
    """Gives an op a cast policy on all devices, in eager and in compiled code.

    It holds under ``torch.autocast`` and under every policy, as if all tables had it; what a
    policy says about the op itself, its module, or by rule comes before. Call it once, where
    the op is defined. If the op was reported before, all that was compiled is compiled anew.

    Args:
        op: Such as ``"mylib::op"``: all its overloads that compute, or ``"mylib::op.overload"``,
            or the op itself.
        policy: A cast policy, or its name.
        args: Arguments that are treated otherwise, as ``Policy.with_args`` takes them.

    Raises:
        PolicyError: There is no such op, policy or argument; the op cannot take the policy, is
            PyTorch's own (``Policy.with_ops`` is for these), or is registered otherwise.
    """
    op = op_text(op)
    found = to_policy(f"op {op!r}", policy)
    names = tuple(n for n in expand_ops(op) if takes_policy(n, found))
    if not names:
        raise PolicyError(f"op {op!r} cannot be {found.value}: it computes no tensors from tensors")
    entry = RegisteredOp(found, arg_override(op, args, ()).args if args else ())
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
        raise PolicyError(f"{name} is PyTorch's own: Policy.with_ops changes how it is cast")
    before = REGISTERED.setdefault(name, entry)
    if before != entry:
        raise PolicyError(
            f"{name} is registered as {before.policy.value} {dict(before.args)} already; "
            "Policy.with_ops gives it another policy"
        )


def report_mixture(call: Call, device_type: str) -> None:
    """Reports once that an unlisted op gets floating-point dtypes that differ."""
    name = qualified_name(call[0])
    if name.startswith(_OWN_NAMESPACES) or name in _reported:
        return
    tensors = [t for t in castable_tensors(call) if is_eligible(t, device_type)]
    dtypes = sorted({dtype_name(t.dtype) for t in tensors})
    if len(dtypes) < 2:
        return
    _reported.add(name)
    log.warning(
        "%s gets %s under autocast, which has no policy for it. If it rejects that, set "
        'the cast policy: amp_fx.register_op("%s", "fp32")  # or "lower_precision_fp", '
        '"promote", "keep"',
        name,
        " and ".join(dtypes),
        name,
    )


_OWN_NAMESPACES = ("aten::", "prims::", "prim::", "amp_fx::", "inductor::")
_reported: set[str] = set()


def register_device(
    device_type: str, dtypes: Sequence[torch.dtype | str] | None = None, table: Table | None = None
) -> None:
    """Makes a PrivateUse1 backend autocast as a built-in device does, eager and compiled.

    Every preset gets a table for it, the backend treats it as it treats other devices, and
    ``torch.autocast`` gets the kernels that the backend has not registered by itself.
    Call it once, after ``torch.utils.rename_privateuse1_backend``.

    Args:
        device_type: The name given there.
        dtypes: What it can autocast to, dtypes or their names. None asks the backend's module
            (``torch.<device_type>.get_amp_supported_dtype()``), as ``torch.autocast`` does;
            what is given becomes the module's answer.
        table: Cast policies by qualified overload name. None takes the lists that
            ``ATen/autocast_mode.h`` offers to new devices.

    Raises:
        OptionError: torch's PrivateUse1 backend has another name, the dtypes are none to
            autocast to, or neither the caller nor the module names any.
        PolicyError: An entry of the table is not usable.
    """
    _check_name(device_type)
    supported = _checked_dtypes(device_type, dtypes)
    add_device(device_type, table)
    if dtypes is not None:
        _set_supported(device_type, supported)
    add_kernels_of_device(device_type)


def _check_name(device_type: object) -> None:
    name = privateuse1_name()
    if device_type == name:
        return
    raise OptionError(
        f"{device_type!r} is not the name of torch's PrivateUse1 backend, which is {name!r}: "
        "torch.utils.rename_privateuse1_backend names it; the tables of built-in devices are "
        "replaced by amp_fx.Policy.with_device"
    )


def _checked_dtypes(
    device_type: str, dtypes: Sequence[torch.dtype | str] | None
) -> list[torch.dtype]:
    if dtypes is None:
        ask = getattr(getattr(torch, device_type, None), "get_amp_supported_dtype", None)
        if ask is None:
            raise OptionError(
                f"torch.{device_type}.get_amp_supported_dtype() does not exist: give dtypes, "
                "or register a module that has it (torch._register_device_module)"
            )
        dtypes = ask()
    given = list(dtypes)
    found = [dtype for dtype in map(as_dtype, given) if dtype is not None]
    is_usable = len(found) == len(given) and all(d.is_floating_point for d in found)
    if not found or not is_usable:
        raise OptionError(
            f"dtypes={given!r}: give floating-point dtypes to autocast to, "
            "such as [torch.bfloat16, torch.float16]"
        )
    return found


def _set_supported(device_type: str, supported: list[torch.dtype]) -> None:
    module: Any = getattr(torch, device_type, None)
    if module is None:
        module = types.ModuleType(f"torch.{device_type}")
        register_device_module(device_type, module)
    module.get_amp_supported_dtype = lambda: list(supported)

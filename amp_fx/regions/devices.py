"""``amp_fx.register_device``: autocast for a backend outside of PyTorch (PrivateUse1)."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import as_dtype
from amp_fx.errors import DeviceError
from amp_fx.policies.policy import add_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.tables.build import Table


def register_device(
    device_type: str,
    dtypes: Sequence[torch.dtype | str] | None = None,
    table: Table | None = None,
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
        DeviceError: torch's PrivateUse1 backend has another name, the dtypes are none to
            autocast to, or neither the caller nor the module names any.
        PolicyError: An entry of the table is not usable.
    """
    _check_name(device_type)
    supported = _checked_dtypes(device_type, dtypes)
    add_device(device_type, table)
    if dtypes is not None:
        _set_supported(device_type, supported)
    from amp_fx.regions.kernels import prepare_device

    prepare_device(device_type)


def _check_name(device_type: object) -> None:
    name = torch._C._get_privateuse1_backend_name()
    if device_type == name:
        return
    raise DeviceError(
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
            raise DeviceError(
                f"torch.{device_type}.get_amp_supported_dtype() does not exist: give dtypes, "
                "or register a module that has it (torch._register_device_module)"
            )
        dtypes = ask()
    given = list(dtypes)
    found = [dtype for dtype in map(as_dtype, given) if dtype is not None]
    is_usable = len(found) == len(given) and all(d.is_floating_point for d in found)
    if not found or not is_usable:
        raise DeviceError(
            f"dtypes={given!r}: give floating-point dtypes to autocast to, "
            "such as [torch.bfloat16, torch.float16]"
        )
    return found


def _set_supported(device_type: str, supported: list[torch.dtype]) -> None:
    module: Any = getattr(torch, device_type, None)
    if module is None:
        module = types.ModuleType(f"torch.{device_type}")
        torch._register_device_module(device_type, module)  # type: ignore[no-untyped-call]
    module.get_amp_supported_dtype = lambda: list(supported)

"""``amp_fx.conformance``: checks that a device's autocast is that of a policy."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

from amp_fx.accelerators.checks import CHECKS
from amp_fx.accelerators.cpp import device_lists
from amp_fx.accelerators.report import CheckResult, ConformanceReport
from amp_fx.accelerators.target import Target, supports
from amp_fx.dtypes import as_dtype, dtype_name
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.policies.policy import as_policy
from amp_fx.random_states import preserve_random_states
from amp_fx.regions.state import check_device_type, left_on_error, no_autocast
from amp_fx.torch_private.autocast import privateuse1_name

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from amp_fx.accelerators.checks import Check
    from amp_fx.policies.policy import Policy

LOW_DTYPES = (torch.bfloat16, torch.float16)


def conformance(
    device_type: str,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] | None = None,
    *,
    policy: Policy | str | os.PathLike[str] = "torch",
) -> ConformanceReport:
    """Checks the autocast of an installed device, in eager code.

    For each op of the device's table, compares the kernels that autocast reaches with those of
    casts by hand, and the results with the CPU's. Also checks regions, ``torch.amp.custom_fwd``,
    checkpoints, gradients and ``torch.amp.GradScaler`` (``amp_fx.accelerators.checks.CHECKS``).
    Afterwards, the state of autocast, the default dtype and random states are those before the
    call.

    Args:
        device_type: As in ``torch.device(...).type``. Import the device's package before.
        dtype: The dtypes of the regions, or names of them. Defaults to those of bfloat16 and
            float16 that the device can autocast to.
        policy: A ``Policy``, the name of a preset, or the path of a policy file with the device's
            table. A PrivateUse1 device without a table has the reference lists of
            ``ATen/autocast_mode.h`` and the ban of ``binary_cross_entropy``, as in
            ``amp_fx.register_device``.

    Raises:
        RegionError: The device type does not exist, or it cannot autocast.
        OptionError: A dtype is not a dtype, or the device cannot autocast to it; or the backend
            has no module.
        PolicyError: The policy is invalid.
        UnsupportedError: The machine has no such device, or it stopped working: it is busy or out
            of memory.
    """
    check_device_type(device_type)
    _check_module(device_type)
    table = device_lists(as_policy(policy), device_type)
    results: list[CheckResult] = []
    with _unchanged_state():
        Target(device_type, torch.float32, table).check_alive(f"cannot use {device_type!r}")
        dtypes = _checked_dtypes(device_type, dtype)
        for low_dtype in dtypes:
            others = tuple(other for other in dtypes if other is not low_dtype)
            target = Target(device_type, low_dtype, table, others)
            for name, check in CHECKS.items():
                results += _run(name, check, target)
    return ConformanceReport(device_type, torch.__version__, tuple(results))


def _run(name: str, check: Check, target: Target) -> list[CheckResult]:
    """Returns the results of a check.

    Raises:
        UnsupportedError: The device cannot run it.
    """
    dtype = dtype_name(target.dtype)
    try:
        return [CheckResult(name, dtype, *comparison) for comparison in check(target)]
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{target.device_type} cannot run the check {name!r} in {dtype}: "
            f"{target.failure(error)}"
        ) from error


def _check_module(device_type: str) -> None:
    """Raises an error if a PrivateUse1 backend lacks what ``torch.autocast`` requires."""
    if device_type != privateuse1_name():
        return
    if not hasattr(getattr(torch, device_type, None), "get_amp_supported_dtype"):
        raise OptionError(
            f"{device_type!r} cannot autocast: torch.{device_type}.get_amp_supported_dtype() does "
            "not exist. Import the backend's package, and define this function or call "
            "amp_fx.register_device"
        )


def _checked_dtypes(
    device_type: str, dtype: torch.dtype | str | Sequence[torch.dtype | str] | None
) -> list[torch.dtype]:
    supported = [low for low in LOW_DTYPES if supports(device_type, low)]
    names = ", ".join(map(dtype_name, supported)) or "neither bfloat16 nor float16"
    if dtype is None:
        if supported:
            return supported
        raise OptionError(f"{device_type!r} can autocast to {names}")
    given = [dtype] if isinstance(dtype, (str, torch.dtype)) else [*dtype]
    for value in given:
        if as_dtype(value) not in supported:
            raise OptionError(
                f"{device_type!r} cannot autocast to {value!r}; it can autocast to {names}"
            )
    return [low for low in supported if low in map(as_dtype, given)]


@contextlib.contextmanager
def _unchanged_state() -> Iterator[None]:
    """Context outside of regions, with torch's default settings. Restores the previous ones."""
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with (
            torch.device("cpu"),  # the default device
            preserve_random_states(),
            left_on_error(),
            no_autocast(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default_dtype)

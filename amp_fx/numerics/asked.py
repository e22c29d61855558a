"""The checked arguments of the tools that run a step."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import OptionError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.front.settings import policy_for, unwrap
from amp_fx.observe.state import check_has_data
from amp_fx.options import check_device_dtype, default_dtype, to_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Asked:
    """The checked arguments of ``accuracy``."""

    dtype: torch.dtype | None
    policy: Policy
    device_type: str | None
    scale: float = 1.0
    loss: Callable[[Any], Any] | None = None
    modules: tuple[str, ...] | None = None


def asked_for(
    step: Any, name: str, dtype: Any, policy: Any, **others: Any
) -> tuple[Callable[..., Any], Asked]:
    """Returns the step before compilation, and the arguments with the settings of compilation."""
    target, given = unwrap(step, name)
    dtype = given.dtype if dtype is None else to_dtype("dtype", dtype)
    return target, Asked(dtype, policy_for(policy, given), given.device_type, **others)


def check_number(
    name: str, value: Any, what: str, *, least: float = 0.0, is_whole: bool = False
) -> None:
    """Raises an error if an argument is not a finite number of at least ``least``."""
    is_number = isinstance(value, int if is_whole else (int, float)) and value is not True
    if not is_number or value is False or not least <= value < math.inf:
        raise OptionError(f"{name}={value!r} is not {what}")


def scale_for(scale: Any) -> float:
    """Returns a scale of the loss, checked."""
    check_number("scale", scale, "a positive number", least=sys.float_info.min)
    return float(scale)


def patterns_of(name: str, value: Any) -> tuple[str, ...]:
    """Returns patterns of module paths, checked."""
    patterns = (value,) if isinstance(value, str) else value
    is_sequence = isinstance(patterns, (tuple, list))
    if not is_sequence or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"{name}={value!r}: give patterns of module paths, like 'h.*.mlp'")
    return tuple(patterns)


def device_type_of(step: Any, args: Any, asked: Asked) -> str:
    """Returns the device type of the tensors; an accelerator is preferred to the CPU."""
    if asked.device_type is not None:
        return asked.device_type
    tensors = leaf_tensors(args)
    if isinstance(step, torch.nn.Module):
        tensors += [*step.parameters(), *step.buffers()]
    for tensor in tensors:
        check_has_data(tensor)
    found = {tensor.device.type for tensor in tensors} - {"cpu"}
    return next(iter(sorted(found)), "cpu")


def low_dtype_of(asked: Asked, device_type: str) -> torch.dtype:
    """Returns the low dtype: the argument, that of the policy, or autocast's for the device."""
    dtype = asked.dtype or asked.policy.low_dtype(device_type) or default_dtype(device_type)
    if dtype.itemsize >= torch.float32.itemsize:
        raise OptionError(f"dtype={dtype} is not below float32")
    check_device_dtype(device_type, dtype)
    return dtype


def name_of(step: Any) -> str:
    """Returns the name of a step."""
    return str(getattr(step, "__qualname__", None) or type(step).__name__)

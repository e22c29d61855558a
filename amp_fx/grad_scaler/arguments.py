"""Checks of what users hand to the scaler; each returns the value in the form the scaler keeps."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amp_fx.errors import ScalerStateDictError, ScalerTypeError, ScalerValueError

STATE_DICT_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def positive_float(value: object, name: str) -> float:
    """A finite number above 0 that float32, in which the scale is kept, can hold and invert."""
    number = _real(value, name, "a finite number above 0")
    float32 = torch.finfo(torch.float32)
    if not float32.tiny <= number <= float32.max:  # nor is NaN
        raise ScalerValueError(
            f"{name} must be a finite number above 0 that float32 can hold and invert, so between "
            f"{float32.tiny:.3g} and {float32.max:.3g}; got {value!r}."
        )
    return number


def growth_factor(value: object) -> float:
    """A finite number above 1."""
    number = _real(value, "growth_factor", "a finite number above 1")
    if not (math.isfinite(number) and number > 1.0):
        raise ScalerValueError(f"growth_factor must be a finite number above 1; got {value!r}.")
    return number


def backoff_factor(value: object) -> float:
    """A number between 0 and 1, neither included."""
    number = _real(value, "backoff_factor", "a number between 0 and 1")
    if not 0.0 < number < 1.0:
        raise ScalerValueError(f"backoff_factor must lie between 0 and 1; got {value!r}.")
    return number


def growth_interval(value: object) -> int:
    """A whole number of at least 1."""
    return whole(value, "growth_interval", minimum=1)


def whole(value: object, name: str, minimum: int) -> int:
    """An integer of at least `minimum`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if isinstance(value, (bool, Tensor)) or number < minimum:
        raise ScalerValueError(f"{name} must be an integer of at least {minimum}; got {value!r}.")
    return number


def one_of(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise ScalerValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
    return value


def max_norm(value: object) -> float:
    """A number, or a tensor of one element, of at least 0; infinity measures without clipping."""
    number = _real(_item(value), "max_norm", "a number of at least 0")
    if not number >= 0.0:
        raise ScalerValueError(f"max_norm must be a number of at least 0; got {value!r}.")
    return number


def norm_type(value: object) -> float:
    """The order p of a norm; may be infinite, also as "inf"."""
    number = _real(
        math.inf if value == "inf" else value,
        "norm_type",
        "the order of a norm, such as 2.0 or inf",
    )
    if math.isnan(number):
        raise ScalerValueError(
            f"norm_type must be the order of a norm, such as 2.0; got {value!r}."
        )
    return number


def device_type(value: object) -> str:
    """The type of a device, such as "cuda" or "cpu"."""
    try:
        return torch.device(value).type  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ScalerValueError(
            f"device must name a device type such as 'cuda' or 'cpu'; got {value!r}."
        ) from error


def new_scale_tensor(value: Tensor, device_type: str) -> Tensor:
    """A tensor that can become the scale, as 0-dim.

    The value itself is looked at on the CPU only: elsewhere that would wait for the device.
    """
    if value.device.type != device_type or value.numel() != 1 or value.requires_grad:
        raise ScalerValueError(
            f"new_scale must be a float or a tensor of one element on {device_type!r} with "
            f"requires_grad=False; got one of shape {tuple(value.shape)} on {value.device} with "
            f"requires_grad={value.requires_grad}."
        )
    if value.is_cpu:
        positive_float(value.reshape(()).tolist(), "new_scale")
    return value.reshape(())


def optimizer(value: Any) -> Any:
    """Anything that steps and has `param_groups`, as wrappers around optimizers do."""
    has_groups = isinstance(getattr(value, "param_groups", None), (list, tuple))
    if isinstance(value, type) or not (has_groups and callable(getattr(value, "step", None))):
        raise ScalerTypeError(
            "expected an optimizer, with param_groups and step(); got "
            f"{value.__name__ if isinstance(value, type) else type(value).__name__!r}."
        )
    return value


def state_dict(value: object) -> dict[str, Any]:
    """The five entries of a scaler's state, all checked.

    Some ways to save a checkpoint make tensors of its numbers; they may be.
    """
    if not isinstance(value, Mapping):
        raise ScalerStateDictError(f"expected a dict; got {type(value).__name__!r}.")
    if not value:
        raise ScalerStateDictError(
            "The source state dict is empty, possibly because it was saved from a disabled "
            "instance of GradScaler."
        )
    missing = [key for key in STATE_DICT_KEYS if key not in value]
    extra = [key for key in value if key not in STATE_DICT_KEYS]
    if missing or extra:
        raise ScalerStateDictError(
            f"a scaler's state has the entries {', '.join(STATE_DICT_KEYS)}; "
            f"missing here: {missing or 'none'}; not known: {extra or 'none'}."
        )
    entries = {key: _item(entry) for key, entry in value.items()}
    try:
        return {
            "scale": positive_float(entries["scale"], "scale"),
            "growth_factor": growth_factor(entries["growth_factor"]),
            "backoff_factor": backoff_factor(entries["backoff_factor"]),
            "growth_interval": growth_interval(entries["growth_interval"]),
            "_growth_tracker": whole(entries["_growth_tracker"], "_growth_tracker", minimum=0),
        }
    except (ScalerValueError, ScalerTypeError) as error:
        raise ScalerStateDictError(f"the state dict has a wrong entry: {error}") from error


def device_with_values(value: Tensor) -> torch.device:
    """The device of a tensor, on which the scale can be kept."""
    if value.is_meta:
        raise ScalerValueError(
            "outputs must be on a device that holds values, such as 'cuda' or 'cpu'; got one on "
            "'meta'."
        )
    return value.device


def _item(value: object) -> object:
    """What a tensor of one element holds; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _real(value: object, name: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ScalerTypeError(f"{name} must be {expected}; got {value!r}.")
    return float(value)

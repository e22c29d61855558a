"""Checks of what users pass in; each returns the value in the form in which the scaler keeps it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amp_fx.errors import ScalerStateDictError, ScalerTypeError, ScalerValueError

_FLOAT32 = torch.finfo(torch.float32)


def positive_float(value: object, name: str) -> float:
    """Checks for a number above 0 that float32, in which the scale is kept, holds and inverts."""
    number = _real(value, name, "a finite number above 0")
    if not _FLOAT32.tiny <= number <= _FLOAT32.max:  # NaN is not in the range either
        raise ScalerValueError(
            f"{name} must be a finite number above 0 that float32 can hold and invert, so between "
            f"{_FLOAT32.tiny:.3g} and {_FLOAT32.max:.3g}; got {value!r}."
        )
    return number


def growth_factor(value: object) -> float:
    """Checks for a finite number above 1."""
    return _number(value, "growth_factor", "a finite number above 1", lambda x: 1.0 < x < math.inf)


def backoff_factor(value: object) -> float:
    """Checks for a number between 0 and 1, both excluded."""
    return _number(value, "backoff_factor", "a number between 0 and 1", lambda x: 0.0 < x < 1.0)


def whole(value: object, name: str, minimum: int) -> int:
    """Checks for an integer of at least `minimum`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if isinstance(value, (bool, Tensor)) or number < minimum:
        raise ScalerValueError(f"{name} must be an integer of at least {minimum}; got {value!r}.")
    return number


def one_of(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """Checks for one of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise ScalerValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
    return value


def clipping(max_norm: object, norm_type: object) -> tuple[float, float]:
    """Checks the largest norm, which may be a tensor, and the order, which may be "inf"."""
    largest = _number(_item(max_norm), "max_norm", "a number of at least 0", lambda x: x >= 0.0)
    order = math.inf if norm_type == "inf" else norm_type
    expected = "the order of a norm, such as 2.0 or inf"
    return largest, _number(order, "norm_type", expected, lambda x: not math.isnan(x))


def optional_clipping(max_norm: object, norm_type: object) -> dict[str, Any]:
    """Checks the same, by name, where None stands for not clipping."""
    largest, order = clipping(0.0 if max_norm is None else max_norm, norm_type)
    return {"max_norm": None if max_norm is None else largest, "norm_type": order}


def device_type(value: object) -> str:
    """Checks for a device, and returns its type, such as "cuda" or "cpu"."""
    try:
        return torch.device(value).type  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ScalerValueError(
            f"device must name a device type such as 'cuda' or 'cpu'; got {value!r}."
        ) from error


def new_scale_tensor(value: Tensor, device_type: str) -> Tensor:
    """Checks for a tensor that can become the scale, and returns it as 0-dim.

    Looks at the value itself on the CPU only: elsewhere that would wait for the device.
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
    """Checks for anything that steps and has `param_groups`, as wrappers around optimizers do."""
    has_groups = isinstance(getattr(value, "param_groups", None), (list, tuple))
    if isinstance(value, type) or not (has_groups and callable(getattr(value, "step", None))):
        raise ScalerTypeError(
            "expected an optimizer, with param_groups and step(); got "
            f"{value.__name__ if isinstance(value, type) else type(value).__name__!r}."
        )
    return value


_STATE: dict[str, Callable[[object], Any]] = {
    "scale": lambda value: positive_float(value, "scale"),
    "growth_factor": growth_factor,
    "backoff_factor": backoff_factor,
    "growth_interval": lambda value: whole(value, "growth_interval", minimum=1),
    "_growth_tracker": lambda value: whole(value, "_growth_tracker", minimum=0),
}
"""The entries of a scaler's state, and what checks them."""


def state_dict(value: object) -> dict[str, Any]:
    """Checks the five entries of a scaler's state.

    Takes tensors of one element for numbers, as some ways to save a checkpoint make them.
    """
    if not isinstance(value, Mapping):
        raise ScalerStateDictError(f"expected a dict; got {type(value).__name__!r}.")
    if not value:
        raise ScalerStateDictError(
            "The source state dict is empty, possibly because it was saved from a disabled "
            "instance of GradScaler."
        )
    missing = [key for key in _STATE if key not in value]
    extra = [key for key in value if key not in _STATE]
    if missing or extra:
        raise ScalerStateDictError(
            f"a scaler's state has the entries {', '.join(_STATE)}; "
            f"missing here: {missing or 'none'}; not known: {extra or 'none'}."
        )
    try:
        return {key: check(_item(value[key])) for key, check in _STATE.items()}
    except (ScalerValueError, ScalerTypeError) as error:
        raise ScalerStateDictError(f"the state dict has a wrong entry: {error}") from error


def device_with_values(value: Tensor) -> torch.device:
    """Returns the device of a tensor, on which the scale can be kept."""
    if value.is_meta:
        raise ScalerValueError(
            "outputs must be on a device that holds values, such as 'cuda' or 'cpu'; got one on "
            "'meta'."
        )
    return value.device


def _item(value: object) -> object:
    """Returns what a tensor of one element holds; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _number(value: object, name: str, expected: str, is_allowed: Callable[[float], bool]) -> float:
    number = _real(value, name, expected)
    if not is_allowed(number):
        raise ScalerValueError(f"{name} must be {expected}; got {value!r}.")
    return number


def _real(value: object, name: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ScalerTypeError(f"{name} must be {expected}; got {value!r}.")
    return float(value)

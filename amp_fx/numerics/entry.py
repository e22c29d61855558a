"""``amp_fx.accuracy``."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.front.settings import policy_for, unwrap
from amp_fx.numerics.report import AccuracyReport
from amp_fx.numerics.running import run_step
from amp_fx.observe.state import check_has_data
from amp_fx.options import check_device_dtype, default_dtype, to_dtype
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from amp_fx.policies.policy import Policy

REFERENCES = (torch.float32, torch.float64)


@takes_inputs_later
def accuracy(
    step: Callable[..., Any],
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    reference: torch.dtype | str = "float32",
    scale: float = 1.0,
    loss: Callable[[Any], Any] | None = None,
    modules: str | Iterable[str] | None = None,
) -> Callable[..., AccuracyReport]:
    """Finds the ops whose low precision hurts a step, and measures their errors.

    ``amp_fx.accuracy(step)(x, y)`` runs one forward and backward in mixed precision, eagerly, and
    computes a second value of every tensor in the reference precision. Elements that overflow are
    replaced by the largest number of the dtype, so that later overflows are found too. Buffers,
    gradients, optimizers and random numbers are restored, and nothing is compiled. Other Python
    state of the program is unknown, and changes as by two calls of the step.

    Eager autocast rounds after every op, but inductor's fused kernels keep float32 inside: errors
    of compiled programs are the same or smaller.

    Args:
        step: A module or a function. If its first output is a floating-point scalar, that is the
            loss; else effects are those on all outputs, in a random direction. A step may call
            ``backward`` itself. Compiled code runs eagerly, with the settings of
            ``amp_fx.compile``.
        dtype: The low dtype; by default autocast's for the device type.
        policy: A ``Policy``, the name of a preset or the path of a policy file; by default that
            of the ambient region, else PyTorch's. Under another policy than PyTorch's, the
            rewritten graphs of the step run op by op, and what runs outside of them is not
            examined.
        reference: ``"float32"``: the program without autocast; or ``"float64"``, which also shows
            the errors of float32 ops.
        scale: The factor of the loss in the backward, as of a gradient scaler.
        loss: Returns a scalar, given the outputs of the step.
        modules: Patterns of modules (``"h.3.*"``) to measure; the whole step still runs.

    Returns:
        A function that takes the step's arguments and returns an ``AccuracyReport``.

    Raises:
        OptionError: An option has an invalid value.
        PolicyError: The policy is invalid.
        ArgumentTypeError: The step is neither a module nor a function.
        UnsupportedError: When called: tensors are fake or on ``meta``, the model is in float64 or
            in a low dtype, no op takes a floating-point tensor, or no output can be differentiated.
    """
    others = {
        "reference": _reference(reference),
        "scale": scale_for(scale),
        "loss": loss,
        "modules": None if modules is None else patterns_of("modules", modules),
    }
    target, asked = asked_for(step, "amp_fx.accuracy", dtype, policy, **others)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def accuracy_call(*args: Any, **kwargs: Any) -> AccuracyReport:
        return examine(target, asked, args, kwargs)

    return accuracy_call


@dataclasses.dataclass(frozen=True)
class Asked:
    """The checked arguments of ``accuracy``."""

    dtype: torch.dtype | None
    policy: Policy
    device_type: str | None
    reference: torch.dtype = torch.float32
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


def _reference(reference: Any) -> torch.dtype:
    found = to_dtype("dtype", reference)
    if found not in REFERENCES:
        raise OptionError(f"reference={reference!r} is neither 'float32' nor 'float64'")
    return found


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
    if dtype.itemsize >= asked.reference.itemsize:
        raise OptionError(f"dtype={dtype} is not below the reference {asked.reference}")
    check_device_dtype(device_type, dtype)
    return dtype


def examine(
    step: Callable[..., Any], asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AccuracyReport:
    """Returns the report on one call."""
    device_type = device_type_of(step, (args, kwargs), asked)
    dtype = low_dtype_of(asked, device_type)
    region = functools.partial(torch.autocast, device_type, dtype)
    with working(f"examining {name_of(step)} in {dtype_name(dtype)}"):
        measured = run_step(step, args, kwargs, asked, dtype, region)
    if asked.modules is not None and not measured["nodes"]:
        raise UnsupportedError(
            f"modules={asked.modules!r} matches no module in which an op runs in low precision"
        )
    return AccuracyReport(
        model=name_of(step),
        used_policy=asked.policy,
        dtype=dtype_name(dtype),
        device_type=device_type,
        reference=dtype_name(asked.reference),
        scale=asked.scale,
        **measured,
    )


def name_of(step: Any) -> str:
    """Returns the name of a step."""
    return str(getattr(step, "__qualname__", None) or type(step).__name__)

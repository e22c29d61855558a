"""``amp_fx.accuracy``."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import dtype_name
from amp_fx.errors import PolicyWarning, UnsupportedError
from amp_fx.numerics.asked import (
    Asked,
    asked_for,
    device_type_of,
    low_dtype_of,
    name_of,
    patterns_of,
    scale_for,
)
from amp_fx.numerics.report import AccuracyReport
from amp_fx.numerics.running import run_step
from amp_fx.policies.policy import preset
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


@takes_inputs_later
def accuracy(
    step: Callable[..., Any],
    *,
    dtype: torch.dtype | str | None = None,
    scale: float = 1.0,
    loss: Callable[[Any], Any] | None = None,
    modules: str | Iterable[str] | None = None,
) -> Callable[..., AccuracyReport]:
    """Finds the ops whose low precision hurts a step, and measures their errors.

    ``amp_fx.accuracy(step)(x, y)`` runs one forward and backward in mixed precision, eagerly, and
    computes a second value of every tensor in float32, without autocast. Elements that overflow are
    replaced by the largest number of the dtype, so that later overflows are found too. Buffers,
    gradients, optimizers and random numbers are restored, and nothing is compiled. Other Python
    state of the program is unknown, and changes as by two calls of the step.

    Eager autocast rounds after every op, but inductor's fused kernels keep float32 inside: errors
    of compiled programs are the same or smaller.

    Args:
        step: A module or a function. If its first output is a floating-point scalar, that is the
            loss; else effects are those on all outputs, in a random direction. A step may call
            ``backward`` itself. Compiled code runs eagerly, with the dtype and the device type of
            ``amp_fx.compile``; under a policy it follows ``torch.autocast``, and a warning says so.
        dtype: The low dtype; by default autocast's for the device type.
        scale: The factor of the loss in the backward, as of a gradient scaler.
        loss: Returns a scalar, given the outputs of the step.
        modules: Patterns of modules (``"h.3"``) to examine. The rest of the step runs in mixed
            precision only: the reference of these modules has the inputs and the gradients of
            outputs that they get there, and copies only their tensors.

    Returns:
        A function that takes the step's arguments and returns an ``AccuracyReport``.

    Raises:
        OptionError: An option has an invalid value.
        ArgumentTypeError: The step is neither a module nor a function.
        UnsupportedError: When called: tensors are fake or on ``meta``, the model is in float64 or
            in a low dtype, no op takes a floating-point tensor, or no output can be differentiated.
    """
    others = {
        "scale": scale_for(scale),
        "loss": loss,
        "modules": None if modules is None else patterns_of("modules", modules),
    }
    target, asked = asked_for(step, "amp_fx.accuracy", dtype, None, **others)
    if asked.policy != preset("torch"):
        warnings.warn(
            "amp_fx.accuracy runs the step eagerly, where ops follow torch.autocast and not the "
            "policy; amp_fx.search(policy=...) runs it under a policy",
            PolicyWarning,
            stacklevel=3,
        )

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def accuracy_call(*args: Any, **kwargs: Any) -> AccuracyReport:
        return examine(target, asked, args, kwargs)

    return accuracy_call


def examine(
    step: Callable[..., Any], asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AccuracyReport:
    """Returns the report on one call."""
    device_type = device_type_of(step, (args, kwargs), asked)
    dtype = low_dtype_of(asked, device_type)
    with working(f"examining {name_of(step)} in {dtype_name(dtype)}"):
        measured = run_step(step, args, kwargs, asked, dtype, device_type)
    if asked.modules is not None and not measured["nodes"]:
        raise UnsupportedError(
            f"modules={asked.modules!r} matches no module in which an op runs in low precision"
        )
    return AccuracyReport(
        model=name_of(step),
        dtype=dtype_name(dtype),
        device_type=device_type,
        scale=asked.scale,
        modules=asked.modules,
        **measured,
    )

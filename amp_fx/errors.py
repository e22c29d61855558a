"""Every error that amp_fx raises on purpose."""

from __future__ import annotations

import difflib
import functools
import typing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = typing.ParamSpec("P")
R = typing.TypeVar("R")


class AmpFxError(Exception):
    """Base of all errors raised by amp_fx."""


class OptionError(AmpFxError, ValueError):
    """An option of the backend is unknown or has a value that is not allowed."""


class PolicyError(AmpFxError, ValueError):
    """A policy, an op table or an entry of one is not usable."""


class PolicyWarning(UserWarning):
    """A part of a policy does nothing: no module of the model fits a pattern."""


class DtypeWarning(UserWarning):
    """Nobody chose the low-precision dtype, or the device has no units for it; names the device."""


class BannedOpError(AmpFxError, RuntimeError):
    """An op that autocast bans was called with floating-point inputs in a region."""


class StaleWeightError(AmpFxError, RuntimeError):
    """A kept copy of a weight differs from the weight (found by the ``verify`` option)."""


class KeepError(AmpFxError, ValueError):
    """``amp_fx.keep`` got an argument that it cannot keep; the message says which."""


class RegionError(AmpFxError, RuntimeError, ValueError):
    """An autocast region cannot be entered, or is left while another region is open inside it.

    torch.autocast raises RuntimeError or ValueError for the former.
    """


class DeviceError(AmpFxError, ValueError):
    """A device cannot be registered: torch does not know it, or has it built in."""


class CompileTargetError(AmpFxError, TypeError):
    """The argument is neither a module nor a function."""


class ExplainError(AmpFxError, RuntimeError):
    """A model cannot be explained: it cannot be traced, or its inputs do not fit it."""


class ExportError(AmpFxError, RuntimeError):
    """A program cannot be exported in mixed precision; names the node, and why."""


class StoreError(AmpFxError, RuntimeError):
    """The weights of a model cannot be stored in low precision: it is being trained."""


class ShardingError(AmpFxError, RuntimeError):
    """A policy for FSDP2 cannot be made: torch is too old, or the model is another one."""


class ShardingWarning(UserWarning):
    """A policy for FSDP2 saves nothing."""


class AccuracyError(AmpFxError, RuntimeError):
    """A program's accuracy cannot be examined: it has no float32 numbers."""


class SearchError(AmpFxError, RuntimeError):
    """A search cannot go on: the metric fails or gives no number, or nothing reaches it."""


class DrawError(AmpFxError, ValueError):
    """A picture cannot be drawn or written: the suffix, level, focus or folder is wrong."""


class AheadOfTimeError(AmpFxError, RuntimeError):
    """A graph cannot be compiled ahead of time; the message says what prevents saving it."""


class GraphInvariantError(AmpFxError):
    """A graph broke a rule that every pass must keep; names the node and the rule."""


class PassError(AmpFxError):
    """A pass failed; names the pass and those that ran before it."""


class ScalerStateError(AmpFxError, RuntimeError, AssertionError):
    """A method of the gradient scaler was called out of order.

    torch.amp.GradScaler raises RuntimeError for some of these and AssertionError for others; code
    that catches either goes on working.
    """


class ScalerValueError(AmpFxError, ValueError, AssertionError):
    """An argument of the gradient scaler has a value that is not allowed.

    torch.amp.GradScaler raises ValueError for some of these and AssertionError for others.
    """


class ScalerTypeError(AmpFxError, TypeError):
    """An argument of the gradient scaler has the wrong type, such as a missing optimizer."""


class Float16GradientError(AmpFxError, ValueError):
    """Gradients are float16 where unscaling needs float32 ones; names the parameters."""


class ScalerStateDictError(AmpFxError, RuntimeError, KeyError, ValueError):
    """A state dict cannot be loaded into the gradient scaler; says which entry and why.

    torch.amp.GradScaler raises RuntimeError for an empty one and KeyError for a missing entry.
    """

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class NativeBuildError(AmpFxError, RuntimeError):
    """A compiled part cannot be built; gives the compiler's command and message."""


class TorchVersionWarning(UserWarning):
    """This torch is newer than the versions that were tested."""


_INSTEAD = {
    "ScaleCollapseError": "compare scaler.get_scale() with min_scale",
    "ScaleCollapseWarning": "compare scaler.get_scale() with min_scale",
    "Float16LossWarning": "look at scaler.last_step.skipped in the first steps",
}
"""Removed classes, and what to do instead."""


if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.NoReturn:
        instead = f"; it was removed: {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


def takes_inputs_later(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function that returns a function say so if it is given the model's inputs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 1:
            name = f"amp_fx.{function.__name__}"
            message = f"{name} takes a model and returns a function of its inputs: {name}(model)(x)"
            raise TypeError(message)
        return function(*args, **kwargs)

    return call


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Ends a message about an unknown name; empty if none that is known is much like it."""
    near = difflib.get_close_matches(str(name), [*known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

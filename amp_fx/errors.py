"""Every error that amp_fx raises on purpose."""

from __future__ import annotations

import difflib
import typing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class AmpFxError(Exception):
    """Base of all errors raised by amp_fx."""


class OptionError(AmpFxError, ValueError):
    """An option or argument is unknown, or its value is not allowed or not usable."""


class ArgumentTypeError(AmpFxError, TypeError):
    """An argument has the wrong type, such as a number where a module or function is needed."""


class PolicyError(AmpFxError, ValueError):
    """A policy, an op table or an entry of one is not usable."""


class BannedOpError(AmpFxError, RuntimeError):
    """An op that autocast bans was called with floating-point inputs in a region."""


class StaleWeightError(AmpFxError, RuntimeError):
    """A kept copy of a weight differs from the weight (found by the ``verify`` option)."""


class RegionError(AmpFxError, RuntimeError, ValueError):
    """An autocast region cannot be entered, or is left while another region is open inside it.

    torch.autocast raises RuntimeError or ValueError for the former.
    """


class UnsupportedError(AmpFxError, RuntimeError):
    """The model, the program or this machine does not allow the operation; says why.

    A model cannot be traced or exported, weights cannot be stored or gathered in low precision,
    there are no numbers to compare, or a compiled part cannot be built.
    """


class GraphInvariantError(AmpFxError):
    """A graph broke a rule that every pass must keep; names the node and the rule."""


class PassError(AmpFxError):
    """A pass failed; names the pass and those that ran before it."""


class ScalerError(AmpFxError, RuntimeError, ValueError, KeyError, AssertionError):
    """The gradient scaler was called out of order, or got values that it cannot use.

    torch.amp.GradScaler raises any of these classes: code that catches them works with both.
    """

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class PolicyWarning(UserWarning):
    """A part of a policy has no effect: no module or weight of the model matches it."""


class DtypeWarning(UserWarning):
    """The low-precision dtype was not chosen, or the device has no units for it; names it."""


class TorchVersionWarning(UserWarning):
    """The installed torch is not one of the versions that were tested."""


# Older names, for code that catches them.
CompileTargetError = ArgumentTypeError
ScalerTypeError = ArgumentTypeError
DeviceError = OptionError
DrawError = OptionError
KeepError = OptionError
ShardingWarning = PolicyWarning
Float16GradientError = ScalerError
ScalerStateDictError = ScalerError
ScalerStateError = ScalerError
ScalerValueError = ScalerError
AccuracyError = UnsupportedError
AheadOfTimeError = UnsupportedError
ExplainError = UnsupportedError
ExportError = UnsupportedError
NativeBuildError = UnsupportedError
SearchError = UnsupportedError
ShardingError = UnsupportedError
StoreError = UnsupportedError


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


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Ends a message about an unknown name; empty if none that is known is much like it."""
    near = difflib.get_close_matches(str(name), [*known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

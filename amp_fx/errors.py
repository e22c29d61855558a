"""Errors and warnings of amp_fx."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class AmpFxError(Exception):
    """Base of all errors raised by amp_fx."""


class OptionError(AmpFxError, ValueError):
    """An option or argument is unknown or has an invalid value."""


class ArgumentTypeError(AmpFxError, TypeError):
    """An argument has the wrong type, such as a number instead of a module or function."""


class PolicyError(AmpFxError, ValueError):
    """A policy, an op table or one of its entries is invalid."""


class StaleWeightError(AmpFxError, RuntimeError):
    """A cached value differs from what its weights give.

    With ``verify="full"``, the value is stale. With ``AMP_FX_CHECK=1``, compiled code wrote to the
    value or to a weight.
    """


class RegionError(AmpFxError, RuntimeError, ValueError):
    """An autocast region cannot be entered, or was exited before a region inside it.

    torch.autocast raises RuntimeError or ValueError if a region cannot be entered.
    """


class UnsupportedError(AmpFxError, RuntimeError):
    """The model, the program or this machine does not support an operation.

    For example, a model cannot be traced or exported, it calls an op that autocast bans, weights
    cannot be stored or gathered in low precision, there are no numbers to compare, or an extension
    cannot be built. The message contains the reason.
    """


class PassError(AmpFxError):
    """A pass failed. The message names the pass and the passes that ran before it."""


class ScalerStateError(AmpFxError, RuntimeError):
    """The gradient scaler was called in the wrong order, or with a closure."""


class ScalerAssertionError(AmpFxError, AssertionError):
    """A condition that ``torch.amp.GradScaler`` asserts does not hold.

    A factor is on the wrong side of 1, or no gradients were checked before an update.
    """


class PolicyWarning(UserWarning):
    """A policy may not be the intended one, or does not apply.

    No module or weight of the model matches a part of it, the op lists of the installed torch are
    not known, or an op for which it differs runs eagerly or in an opaque node.
    """


class DtypeWarning(UserWarning):
    """The low-precision dtype is a default that may surprise, or the device does not support it."""


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a suggestion, or an empty string."""
    similar = difflib.get_close_matches(str(name), [*candidates], n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def first_line(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its message."""
    return ": ".join((type(error).__name__, *str(error).strip().splitlines()[:1]))

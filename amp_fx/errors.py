"""Every error that amp_fx raises on purpose."""

from __future__ import annotations


class AmpFxError(Exception):
    """Base of all errors raised by amp_fx."""


class OptionError(AmpFxError, ValueError):
    """An option of the backend is unknown or has a value that is not allowed."""


class PolicyError(AmpFxError, ValueError):
    """A policy, an op table or an entry of one is not usable."""


class BannedOpError(AmpFxError, RuntimeError):
    """An op that autocast bans was called with floating-point inputs in a region."""


class GraphInvariantError(AmpFxError):
    """A graph broke a rule that every pass must keep; names the node and the rule."""


class PassError(AmpFxError):
    """A pass failed; names the pass and those that ran before it."""

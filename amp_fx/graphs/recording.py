"""Nobody records graphs through here any more: ``backend.rewrite`` takes an observer."""

from __future__ import annotations


def current_recorder() -> object:
    """Nobody; ``weights.kept_inputs`` asks still."""
    return None

"""Facts about the program that measures, and how figures are written."""

from __future__ import annotations

import platform

import torch

import amp_fx


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and amp_fx."""
    python = platform.python_version()
    return {"python": python, "torch": torch.__version__, "amp_fx": amp_fx.__version__}


def three_digits(value: float) -> str:
    """Formats a number with at least three digits and without an exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"

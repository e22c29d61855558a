"""``python -m amp_fx diff``: where two recorded runs first differ, and who amplifies it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amp_fx.numerics.trace import Trace

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 if all results that are in both files are equal, else 1.
    """
    found = Trace.load(args.before).diff(Trace.load(args.after))
    sys.stdout.write(f"{found.to_json() if args.json else found}\n")
    return 1 if found.ops else 0

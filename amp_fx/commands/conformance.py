"""``python -m amp_fx conformance``: checks the autocast of an installed device."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from amp_fx.accelerators.conformance import conformance
from amp_fx.errors import OptionError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 if the device conforms, else 1.
    """
    import_backends(args.imports)
    report = conformance(args.device, args.dtype, policy=args.policy)
    sys.stdout.write(f"{report.to_json() if args.json else report}\n")
    return 0 if report.passed else 1


def import_backends(modules: Iterable[str]) -> None:
    """Imports the packages of devices.

    Raises:
        OptionError: A package cannot be imported.
    """
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        raise OptionError(f"--import: {type(error).__name__}: {error}") from error

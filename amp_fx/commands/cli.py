"""The command line ``python -m amp_fx``, with one module of ``amp_fx.commands`` per command."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from typing import TYPE_CHECKING

from amp_fx import __version__
from amp_fx.commands.parsers import ADD
from amp_fx.errors import AmpFxError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Imports and runs one command.

    Returns:
        The exit code of the command, or 2 for invalid input.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # prints the usage of the command instead of that of all commands
        commands[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    module = importlib.import_module(f"amp_fx.commands.{parsed.command}")
    run: Callable[[argparse.Namespace], int] = module.run
    try:
        return run(parsed)
    except AmpFxError as error:
        if parsed.traceback:
            traceback.print_exc()
        sys.stderr.write(f"amp_fx {parsed.command}: {error}\n")
        return 2


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the main parser, and the parsers of the commands by name."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_fx",
        description="Automatic mixed precision as a compiler pass for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"amp_fx {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="command", required=True
    )
    for name, (add, examples) in ADD.items():
        add(subparsers)
        added = subparsers.choices[name]
        if examples:
            added.epilog = examples
            added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument(
            "--traceback", action="store_true", help="show where an error comes from"
        )
    return parser, subparsers.choices

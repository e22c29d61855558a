"""The command line ``python -m amp_fx``: one module of ``amp_fx.commands`` per command."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from typing import TYPE_CHECKING

from amp_fx import __version__
from amp_fx.errors import AmpFxError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = ("explain", "export", "accuracy", "audit", "verify", "policy", "demo", "build", "env")
"""Modules of ``amp_fx.commands``; each has ``add_parser(subparsers)`` and ``run(args)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, or what the command returns, or 2 for an error of the user's.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # A command's imports cost seconds: load only the one that is called, if it is known.
    called = tuple(arguments[:1])
    parser, commands = _parser(called if set(called) & set(COMMANDS) else COMMANDS)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # the command's usage helps, not that of them all
        commands[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except AmpFxError as error:
        if parsed.traceback:
            traceback.print_exc()
        sys.stderr.write(f"amp_fx {parsed.command}: {error}\n")
        return 2


def _parser(
    commands: Sequence[str],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of some commands, and that of each."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_fx",
        description="Automatic mixed precision as a compiler pass for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"amp_fx {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="command", required=True
    )
    for name in commands:
        module = importlib.import_module(f"amp_fx.commands.{name}")
        module.add_parser(subparsers)
        added = subparsers.choices[name]
        added.set_defaults(run=module.run)
        if hasattr(module, "EXAMPLES"):
            added.epilog = module.EXAMPLES
            added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument(
            "--traceback", action="store_true", help="show where an error comes from"
        )
    return parser, subparsers.choices

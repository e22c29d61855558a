"""``python -m amp_fx verify``: compares a compiled program with eager autocast bit for bit."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from amp_fx.commands.accuracy import load_step
from amp_fx.commands.explain import make_optimizer
from amp_fx.errors import OptionError
from amp_fx.numerics.verify import verify

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 if all bits are equal, else 1.
    """
    step, inputs = load_step(args)
    options = dict(map(_option, args.option))
    report = verify(
        step,
        dtype=args.dtype,
        policy=args.policy,
        options=options,
        optimizer=None if args.optimizer is None else make_optimizer(args.optimizer, step),
        steps=args.steps,
    )(*inputs)
    sys.stdout.write(f"{report.to_json() if args.json else report}\n")
    return 0 if report.is_equal else 1


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise OptionError(f"--option {text}: write a name and a value, such as numerics=eager")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value

"""``python -m amp_fx verify``: whether a compiled program has the bits of eager autocast."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from amp_fx.commands.accuracy import add_step, load_step
from amp_fx.commands.explain import make_optimizer
from amp_fx.errors import OptionError
from amp_fx.numerics.verify import verify

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
examples:
  python -m amp_fx verify mypackage.models:make_net
  python -m amp_fx verify torch.nn:Tanh --input-shape 8,64 --option numerics=eager
  python -m amp_fx verify mypackage.models:make_net --optimizer AdamW --steps 2

The target is as for accuracy.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``verify`` and its options to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a compiled program with eager autocast, bit for bit",
        description="Names the first node that differs, why, and what makes bits equal.",
    )
    add_step(parser)
    parser.add_argument("--dtype", help="bfloat16 or float16; default: autocast's")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, such as numerics=eager or freezing=false",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="compare its steps too: a class of torch.optim, with its defaults",
    )
    parser.add_argument("--steps", type=int, default=3, help="of the optimizer; default: 3")


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
        raise OptionError(f"--option {text}: give a name and a value, like numerics=eager")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value

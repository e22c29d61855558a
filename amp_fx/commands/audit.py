"""``python -m amp_fx audit``: in which precision a training step runs, and what is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amp_fx.commands.accuracy import load_step
from amp_fx.commands.explain import add_target, make_optimizer
from amp_fx.errors import OptionError
from amp_fx.numerics.audit.entry import audit
from amp_fx.numerics.state import modules_of

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
examples:
  python -m amp_fx audit mypackage.train:make_step
  python -m amp_fx audit mypackage.train:make_step --html audit.html
  python -m amp_fx audit mypackage.models:make_loss --optimizer AdamW --json

The target is a function that makes a training step, or a pair of the step and a tuple of its
inputs. A step calls backward and the optimizer, or it returns the loss.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``audit`` and its options to the command line."""
    parser = subparsers.add_parser(
        "audit",
        help="show in which precision a training step runs, and what is lost",
        description="Runs one training step and shows lost updates, low sums and vain casts.",
    )
    add_target(parser, "of a training step or of what makes it")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and random numbers")
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="step it after the backward: a class of torch.optim, with its defaults",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--html", metavar="PATH", help="write a page with the report")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        1 if there are findings, else 0.
    """
    if args.html is not None and not Path(args.html).parent.is_dir():
        raise OptionError(f"--html {args.html}: the folder does not exist")
    step, inputs = load_step(args)
    optimizer = None
    if args.optimizer is not None:
        optimizer = make_optimizer(args.optimizer, torch.nn.ModuleList(modules_of(step)))
    report = audit(step, optimizer)(*inputs)
    sys.stdout.write(f"{report.to_json() if args.json else report}\n")
    if args.html is not None:
        Path(args.html).write_text(report.to_html(), encoding="utf-8")
        sys.stderr.write(f"wrote {args.html}\n")
    return 1 if report.findings else 0

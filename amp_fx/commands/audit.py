"""``python -m amp_fx audit``: shows the precision of a training step, and its losses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from amp_fx.commands.accuracy import load_step
from amp_fx.commands.explain import make_optimizer
from amp_fx.numerics.audit.entry import audit
from amp_fx.observe.state import modules_of

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        1 if there are findings, else 0.
    """
    step, inputs = load_step(args)
    optimizer = None
    if args.optimizer is not None:
        optimizer = make_optimizer(args.optimizer, torch.nn.ModuleList(modules_of(step)))
    report = audit(step, optimizer)(*inputs)
    if args.markdown:
        sys.stdout.write(report.to_markdown())
    else:
        sys.stdout.write(f"{report.to_json() if args.json else report}\n")
    return 1 if report.findings else 0

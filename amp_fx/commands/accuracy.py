"""``python -m amp_fx accuracy``: finds ops that lose accuracy, and policies that fix them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.commands.explain import load_with_inputs
from amp_fx.errors import OptionError
from amp_fx.numerics.entry import accuracy
from amp_fx.numerics.search import search
from amp_fx.numerics.search_result import SearchResult

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from amp_fx.numerics.report import AccuracyReport


def load_step(args: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loads the step of a command line, and its inputs."""
    torch.manual_seed(args.seed)
    step, inputs = load_with_inputs(args)
    return step, tuple(map(_random, inputs)) if args.input_shape else inputs


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        1 if there are suspects and no search was requested, else 0.
    """
    _check(args)
    step, inputs = load_step(args)
    options: dict[str, Any] = {"dtype": args.dtype, "scale": args.scale}
    run: Callable[..., AccuracyReport | SearchResult]
    if args.search is None:
        run = accuracy(step, modules=args.modules, **options)
    else:
        options |= {"policy": args.policy, "budget": args.budget}
        run = search(step, tolerance=args.search, **options)
    result = run(*inputs)
    sys.stdout.write(f"{result.to_json() if args.json else result}\n")
    if isinstance(result, SearchResult):
        if args.save is not None:
            result.policy.save(args.save)
            sys.stderr.write(f"wrote {args.save}\n")
        return 0
    return 1 if result.suspects else 0


def _check(args: argparse.Namespace) -> None:
    if args.policy is not None and args.search is None:
        raise OptionError("--policy is the policy of a search: pass --search as well")
    if args.save is None:
        return
    if args.search is None:
        raise OptionError("--save writes the policy of a search: pass --search as well")
    if not args.save.endswith(".toml"):
        raise OptionError(f"--save {args.save}: the path of a policy file must end in .toml")
    if not Path(args.save).parent.is_dir():
        folder = str(Path(args.save).parent)
        raise OptionError(f"--save {args.save}: the folder {folder!r} does not exist")


def _random(zeros: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(zeros) if zeros.is_floating_point() else zeros

"""``python -m amp_fx policy``: shows the cast policies of ops by device type, also as C++."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch

from amp_fx.accelerators.cpp import autocast_cpp, compare_lists, registered_lists
from amp_fx.commands.conformance import import_backends
from amp_fx.errors import OptionError
from amp_fx.policies.policy import as_policy
from amp_fx.reports import new_table, printed
from amp_fx.tables import OWN_KERNELS
from amp_fx.tables.cast_policy import NO_POLICY, CastPolicy
from amp_fx.tables.op_names import find_overloads
from amp_fx.tables.reasons import family_of

if TYPE_CHECKING:
    import argparse

    from amp_fx.policies.policy import Policy

OWN_KERNEL = "own kernel"
"""Word for ops with a special autocast kernel in CUDA builds, which amp_fx does not change."""


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 if the file of ``--check`` registers other lists.
    """
    import_backends(args.imports)
    policy = as_policy(args.preset)
    if args.cpp is not None or args.check is not None:
        return _run_cpp(policy, args)
    listed = {op for table in policy.tables.values() for op in table}
    ops = sorted(listed) if args.op is None else find_overloads(args.op, also=listed)
    devices = args.device or policy.tables
    rows = {op: {device: _word(policy, op, device) for device in devices} for op in ops}
    if args.json:
        data = {"policy": policy.name, "torch": torch.__version__, "ops": rows}
        sys.stdout.write(f"{json.dumps(data, indent=2)}\n")
        return 0
    table = new_table("op", "policy", "device types", folded=("device types",))
    reasons: dict[str, None] = {}
    for op, by_device in rows.items():
        for word in dict.fromkeys(by_device.values()):
            if word == NO_POLICY and args.op is None:  # all ops lack a policy on some device
                continue
            names = [device for device, other in by_device.items() if other == word]
            table.add_row(op, word, ", ".join(names))
            if args.op is not None and word not in (OWN_KERNEL, NO_POLICY):
                family = family_of(op, CastPolicy(word))
                reasons |= {} if family is None else {f"{word}: {family.reason}": None}
    sys.stdout.write("\n".join([printed(table), "", *reasons]).rstrip() + "\n")
    return 0


def _run_cpp(policy: Policy, args: argparse.Namespace) -> int:
    """Prints the registrations in C++, or how those in a file differ from them."""
    if args.cpp is None:
        raise OptionError("--check compares a file with --cpp DEVICE: pass both")
    if args.check is None:
        sys.stdout.write(autocast_cpp(policy, args.cpp))
        return 0
    try:
        text = args.check.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--check {args.check}: {error}") from error
    lines = [*compare_lists(registered_lists(text), policy, args.cpp)]
    same = f"{args.check} registers the lists of policy {policy.name!r}, torch {torch.__version__}"
    sys.stdout.write("".join(f"{line}\n" for line in lines or [same]))
    return 1 if lines else 0


def _word(policy: Policy, op: str, device: str) -> str:
    rule = policy.tables[device].get(op)
    default = OWN_KERNEL if op in OWN_KERNELS.get(device, ()) else NO_POLICY
    return rule.value if rule else default

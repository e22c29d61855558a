"""``python -m amp_fx policy``: shows the cast policies of ops by device type, also as C++."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.text import Text

from amp_fx.accelerators.cpp import autocast_cpp, compare_lists, registered_lists
from amp_fx.commands.conformance import import_backends
from amp_fx.errors import OptionError
from amp_fx.policies.policy import Policy, as_policy
from amp_fx.reports import new_table, piped_width, printed
from amp_fx.tables import OWN_KERNELS
from amp_fx.tables.cast_policy import NO_POLICY, CastPolicy
from amp_fx.tables.op_names import find_overloads
from amp_fx.tables.reasons import family_of

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from rich.console import RenderableType

OWN_KERNEL = "own kernel"

MEANING = {
    **{policy.value: policy.effect() for policy in CastPolicy},
    OWN_KERNEL: "has a special autocast kernel in CUDA builds, which amp_fx does not change",
    NO_POLICY: "runs in its inputs' dtypes; ops inside a composite op follow their policies",
}
"""Meanings of the words in the output."""


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 if the file of ``--check`` registers other lists.
    """
    import_backends(args.imports)
    policy = as_policy(args.preset)
    if args.check is not None and args.cpp is None:
        raise OptionError("--check compares a file with --cpp DEVICE: pass both")
    if args.check is not None:
        return _check_cpp(policy, args.cpp, args.check)
    if args.cpp is not None:
        sys.stdout.write(autocast_cpp(policy, args.cpp))
        return 0
    listed = {op for table in policy.tables.values() for op in table}
    ops = sorted(listed) if args.op is None else find_overloads(args.op, also=listed)
    rows = {
        op: {device: _word(policy, op, device) for device in args.device or policy.tables}
        for op in ops
    }
    if args.json:
        data = {"policy": policy.name, "torch": torch.__version__, "ops": rows}
        sys.stdout.write(f"{json.dumps(data, indent=2)}\n")
        return 0
    content = _render(policy, rows, is_one_op=args.op is not None)
    sys.stdout.write(f"{printed(content, None if piped_width() is None else 80)}\n")
    return 0


def _check_cpp(policy: Policy, device_type: str, path: Path) -> int:
    """Prints the differences between registrations in a C++ file and a policy."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--check {path}: {error}") from error
    lines = [*compare_lists(registered_lists(text), policy, device_type)]
    same = f"{path} registers the lists of policy {policy.name!r} with torch {torch.__version__}"
    sys.stdout.write("".join(f"{line}\n" for line in lines or [same]))
    return 1 if lines else 0


def _word(policy: Policy, op: str, device: str) -> str:
    rule = policy.tables[device].get(op)
    default = OWN_KERNEL if op in OWN_KERNELS.get(device, ()) else NO_POLICY
    return rule.value if rule else default


def _render(policy: Policy, rows: dict[str, dict[str, str]], *, is_one_op: bool) -> RenderableType:
    """Returns the table, the meanings of its words, the reasons of one op, and missing ops."""
    table = new_table("op", "policy", "device types", folded=("device types",))
    words: set[str] = set()
    notes: set[str] = set()
    for op, by_device in rows.items():
        for word in dict.fromkeys(by_device.values()):
            if word == NO_POLICY and not is_one_op:
                continue
            devices = [device for device, other in by_device.items() if other == word]
            table.add_row(op, word, ", ".join(devices))
            words.add(word)
            is_rule = word not in (OWN_KERNEL, NO_POLICY)
            family = family_of(op, CastPolicy(word)) if is_rule and is_one_op else None
            notes |= {f"{word}: {family.reason}"} if family is not None else set()
    missing = {op for device in policy.tables for op in policy.gone(device)} & {*rows}
    notes |= {f"{op}: listed, but not in torch {torch.__version__}" for op in missing}
    legend = [f"{word}: {meaning}" for word, meaning in MEANING.items() if word in words]
    head = [] if is_one_op else [Text(f"{policy!r}, torch {torch.__version__}\n")]
    return Group(*head, table, Text(""), *map(Text, [*legend, *sorted(notes)]))

"""``python -m amp_fx policy``: shows the cast policies of ops by device type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from amp_fx.policies.policy import Policy, as_policy
from amp_fx.tables import OWN_KERNELS
from amp_fx.tables.cast_policy import NO_POLICY, CastPolicy
from amp_fx.tables.op_names import find_overloads
from amp_fx.tables.presets import VERSIONS, torch_tables
from amp_fx.tables.reasons import family_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

OWN_KERNEL = "own kernel"

MEANING = {
    **{policy.value: policy.effect() for policy in CastPolicy},
    OWN_KERNEL: "has a special autocast kernel in CUDA builds, which amp_fx does not change",
    NO_POLICY: "runs in its inputs' dtypes; ops inside a composite op follow their policies",
}
"""Meanings of the words in the output."""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0."""
    policy = as_policy(args.preset)
    devices = tuple(dict.fromkeys(args.device or policy.tables))
    console = Console(highlight=False, markup=False, soft_wrap=False)
    if args.op is not None:
        _show_op(policy, args.op, devices, console)
    else:
        _show_all(policy, devices, console)
    return 0


def _show_all(policy: Policy, devices: Sequence[str], console: Console) -> None:
    """Prints a table for each group of device types with equal tables."""
    console.print(f"Policy {policy.name!r} with torch {torch.__version__}\n")
    words: set[str] = set()
    for group in _groups(policy, devices):
        rules = policy.tables[group[0]]
        table = _table("policy", "ops", title=f"{', '.join(group)}: {len(rules)} ops")
        for rule in CastPolicy:
            names = sorted(_short(op) for op, value in rules.items() if value is rule)
            if names:
                table.add_row(f"{rule.value}\n({len(names)})", ", ".join(names))
                words.add(rule.value)
        console.print(table)
        missing = policy.gone(group[0])
        if missing:
            names_missing = ", ".join(map(_short, missing))
            console.print(f"Listed, but not in torch {torch.__version__}: {names_missing}\n")
    _explain(words, console)
    for kind in ("modules", "args"):
        if getattr(policy, kind):
            console.print(f"The policy also has {kind}: {len(getattr(policy, kind))}.")


def _groups(policy: Policy, devices: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for device in devices:
        for group in groups:
            if policy.tables[group[0]] == policy.tables[device]:
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _show_op(policy: Policy, text: str, devices: Sequence[str], console: Console) -> None:
    """Prints the policy of every overload of one op by device types, with the reasons."""
    listed = {op for table in policy.tables.values() for op in table}
    overloads = find_overloads(text, also=listed)
    table = _table("op", "policy", "device types")
    words: set[str] = set()
    for op in overloads:
        for i, (word, on) in enumerate(_words(policy, op, devices).items()):
            table.add_row(op if i == 0 else "", word, ", ".join(on))
            words.add(word)
    console.print(table)
    _explain(words, console)
    for note in (*_reasons(policy, overloads, devices), *_notes(policy, overloads, devices)):
        console.print(note)


def _reasons(policy: Policy, overloads: Iterable[str], devices: Iterable[str]) -> Iterable[str]:
    """Returns the reason of each policy of the ops, without duplicates."""
    rules = {(op, policy.tables[device].get(op)) for op in overloads for device in devices}
    families = {family_of(op, rule) for op, rule in rules if rule is not None}
    return sorted(f"{family.policy.value}: {family.reason}" for family in families if family)


def _words(policy: Policy, op: str, devices: Iterable[str]) -> dict[str, list[str]]:
    """Returns the device types for each treatment of an op."""
    words: dict[str, list[str]] = {}
    for device in devices:
        rule = policy.tables[device].get(op)
        default = OWN_KERNEL if op in OWN_KERNELS.get(device, ()) else NO_POLICY
        words.setdefault(rule.value if rule else default, []).append(device)
    return words


def _notes(policy: Policy, overloads: Iterable[str], devices: Iterable[str]) -> list[str]:
    missing = {op for device in devices for op in policy.gone(device)}
    notes = []
    for op in overloads:
        supported = [v for v in VERSIONS if any(op in t for t in torch_tables(v).values())]
        if supported and supported != [*VERSIONS]:
            versions = ", ".join("{}.{}".format(*version) for version in supported)
            notes.append(f"{op}: in the autocast of torch {versions} only")
        if op in missing:
            notes.append(f"{op}: listed, but not in torch {torch.__version__}")
    return notes


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _explain(words: set[str], console: Console) -> None:
    legend = Table.grid(padding=(0, 2))
    for word, meaning in MEANING.items():
        if word in words:
            legend.add_row(word, meaning)
    console.print(legend)


def _short(op: str) -> str:
    return op.removeprefix("aten::")

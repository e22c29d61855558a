"""``python -m amp_fx policy``: which op autocast runs in which dtype, on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from amp_fx.errors import OptionError
from amp_fx.policies.policy import Policy, as_policy
from amp_fx.tables import DEVICES, OWN_KERNELS
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
    OWN_KERNEL: "casts in a kernel of its own, in CUDA builds; left to PyTorch",
    NO_POLICY: "runs in its inputs' dtypes; ops inside a composite op keep their own policies",
}
"""What each word in the output means."""


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        1 if ``--check`` found a difference, else 0.
    """
    policy = as_policy(args.preset)
    devices = tuple(dict.fromkeys(args.device or policy.tables))
    console = Console(highlight=False, markup=False, soft_wrap=False)
    if args.check:
        if args.op is not None:
            raise OptionError("--check compares all ops; omit the op")
        return _check(policy, devices, console)
    if args.op is not None:
        _show_op(policy, args.op, devices, console)
    else:
        _show_all(policy, devices, console)
    return 0


def _show_all(policy: Policy, devices: Sequence[str], console: Console) -> None:
    """A table per policy for each group of device types that have the same rules."""
    console.print(f"Policy {policy.name!r} with torch {torch.__version__}\n")
    words: set[str] = set()
    for group in _alike(policy, devices):
        rules = policy.tables[group[0]]
        table = _table("policy", "ops", title=f"{', '.join(group)}: {len(rules)} ops")
        for rule in CastPolicy:
            names = sorted(_short(op) for op, value in rules.items() if value is rule)
            if names:
                table.add_row(f"{rule.value}\n({len(names)})", ", ".join(names))
                words.add(rule.value)
        console.print(table)
        gone = policy.gone(group[0])
        if gone:
            names_gone = ", ".join(map(_short, gone))
            console.print(f"Listed, but not in torch {torch.__version__}: {names_gone}\n")
    _explain(words, console)
    for what in ("modules", "args", "rules"):
        if getattr(policy, what):
            console.print(f"It has {what} of its own as well: {len(getattr(policy, what))}.")


def _alike(policy: Policy, devices: Sequence[str]) -> list[list[str]]:
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
    """The rule of every overload of one op, with the device types that share it, and why."""
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
    """The reason of each policy that the ops have, once."""
    rules = {(op, policy.tables[device].get(op)) for op in overloads for device in devices}
    families = {family_of(op, rule) for op, rule in rules if rule is not None}
    return sorted(f"{family.policy.value}: {family.reason}" for family in families if family)


def _words(policy: Policy, op: str, devices: Iterable[str]) -> dict[str, list[str]]:
    """Device types by what happens to an op there."""
    words: dict[str, list[str]] = {}
    for device in devices:
        rule = policy.tables[device].get(op)
        own = OWN_KERNEL if op in OWN_KERNELS.get(device, ()) else NO_POLICY
        words.setdefault(rule.value if rule else own, []).append(device)
    return words


def _notes(policy: Policy, overloads: Iterable[str], devices: Iterable[str]) -> list[str]:
    gone = {op for device in devices for op in policy.gone(device)}
    notes = []
    for op in overloads:
        having = [v for v in VERSIONS if any(op in t for t in torch_tables(v).values())]
        if having and having != [*VERSIONS]:
            versions = ", ".join("{}.{}".format(*version) for version in having)
            notes.append(f"{op}: in the autocast of torch {versions} only")
        if op in gone:
            notes.append(f"{op}: listed, but not in torch {torch.__version__}")
    return notes


def _check(policy: Policy, devices: Sequence[str], console: Console) -> int:
    from amp_fx.tables.measure import LIKE_XPU

    found = differences(policy, devices)
    for device, lines in found.items():
        for line in lines:
            console.print(f"{device}: {line}")
    number = sum(map(len, found.values()))
    console.print(
        f"{policy.name!r} and torch {torch.__version__}: {number} differences in "
        + ", ".join(f"{device} ({len(policy.tables[device])} ops)" for device in devices)
    )
    if measured := [device for device in found if device not in LIKE_XPU]:
        console.print(f"Policies measured by calling each op: {', '.join(measured)}")
    if by_name := [device for device in found if device in LIKE_XPU]:
        console.print(f"Names compared, policies taken from xpu: {', '.join(by_name)}")
    return 1 if number else 0


def differences(policy: Policy, devices: Iterable[str]) -> dict[str, list[str]]:
    """Compares a policy with the installed torch on the devices that PyTorch has tables for.

    No device is needed. Run no model in another thread meanwhile.

    Returns:
        By device type, a line for each op that the two treat differently.
    """
    from amp_fx.tables.measure import measured_table  # slow to import

    found: dict[str, list[str]] = {}
    for device in devices:
        if device in DEVICES:
            ours, theirs = policy.tables[device], measured_table(device)
            pairs = ((op, ours.get(op), theirs.get(op)) for op in sorted({*ours, *theirs}))
            found[device] = [_difference(*pair) for pair in pairs if pair[1] is not pair[2]]
    return found


def _difference(op: str, ours: CastPolicy | None, theirs: CastPolicy | None) -> str:
    if ours and theirs:
        return f"{op}: other policy ({ours.value} here, {theirs.value} in torch)"
    if theirs:
        return f"{op}: missing here ({theirs.value})"
    return f"{op}: missing in torch ({ours.value if ours else 'no policy'})"


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

"""Converts policies to plain data, and back: a preset and overrides."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import dtype_name
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies.changes import module_overrides, op_overrides, to_policy
from amp_fx.policies.policy import Policy, preset, preset_names, with_changes
from amp_fx.tables.float8 import Float8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from amp_fx.policies.changes import ModuleOverride

_KINDS = {
    "name": (str,),
    "base": (str,),
    "devices": (list,),
    "dtype": (str, dict),
    "float8": (dict,),
    "tables": (dict,),
    "ops": (dict, list),
    "modules": (dict, list),
    "args": (dict, list),
}
"""The keys of a policy, and the types of their values."""


def from_dict(entries: Mapping[str, Any]) -> Policy:
    """Returns the policy with the given entries, such as those of a policy file.

    Keys and values are those of ``Policy.with_ops``, ``with_modules`` and ``with_args``. A mapping
    holds the argument of one call, and a list of mappings those of several calls. ``tables``
    replaces the tables of devices. ``devices`` lists the device types if they differ from those of
    the preset. Classes of modules are named ``"class:package.module.Name"``, and their modules must
    be imported. For example, as a file::

        base = "torch"
        dtype = "float16"                    # or: dtype = { cuda = "float16" }
        float8 = { recipe = "rowwise", least_in = 1024, least_out = 1024 }

        [ops]
        softmax = "lower_precision_fp"

        [modules]
        "decoder.*.norm" = "fp32"
        "decoder.0.attn" = { matmul = "fp32" }   # single ops in the module

        [args]
        index_add = { source = "same_as:self" }

    Raises:
        PolicyError: An entry is invalid. The message contains its key.
    """
    for key, value in entries.items():
        if key not in _KINDS:
            raise PolicyError(
                f"unknown key {key!r}: expected one of {', '.join(_KINDS)}"
                f"{did_you_mean(key, _KINDS)}"
            )
        if not isinstance(value, _KINDS[key]):
            allowed = " or ".join(_NAMES[kind] for kind in _KINDS[key])
            raise PolicyError(f"key {key!r}: expected {allowed}, got {value!r}")
    base = preset(entries.get("base", "torch"))
    policy = _with_tables(base, entries)
    policy = policy.with_float8(**_float8(entries.get("float8", {})))
    dtypes = entries.get("dtype", {})
    for device, dtype in dtypes.items() if isinstance(dtypes, dict) else [(None, dtypes)]:
        policy = policy.with_dtype(dtype, device)
    for ops in _groups(entries, "ops"):
        policy = policy.with_ops(ops)
    listed = policy._listed()
    added: list[ModuleOverride] = []  # added at once, because each change copies the policy
    for modules in _groups(entries, "modules"):
        added += module_overrides(modules, listed)
    policy = dataclasses.replace(policy, modules=(*policy.modules, *added))
    for args in _groups(entries, "args"):
        for op, given in args.items():
            policy = policy.with_args(op, given)
    return policy


_NAMES = {str: "a string", list: "a list", dict: "a table"}


def _with_tables(base: Policy, entries: Mapping[str, Any]) -> Policy:
    devices = entries.get("devices", [*base.tables])
    tables = {device: table for device, table in base.tables.items() if device in devices}
    policy = dataclasses.replace(base, name=entries.get("name", base.name), tables=tables)
    for device, table in entries.get("tables", {}).items():
        _check_table(f"tables.{device}", table)
        rules = {op: to_policy(f"op {op!r}", value) for op, value in table.items()}
        policy = policy.with_device(device, rules)
    missing = [device for device in devices if device not in policy.tables]
    if missing:
        raise PolicyError(f"key 'devices': {missing[0]!r} has no table in {base.name!r}")
    return policy


def _float8(given: dict[str, Any]) -> dict[str, Any]:
    allowed = sorted(field.name for field in dataclasses.fields(Float8))
    for name in given:
        if name not in allowed:
            raise PolicyError(f"key 'float8': expected one of {', '.join(allowed)}, got {name!r}")
    return given


def _groups(entries: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    value = entries.get(key, [])
    for group in value if isinstance(value, list) else [value]:
        _check_table(key, group)
        yield group


def _check_table(key: str, value: object) -> None:
    if not isinstance(value, dict):
        raise PolicyError(f"key {key!r}: expected a table, got {value!r}")


def to_dict(policy: Policy) -> dict[str, Any]:
    """Returns the preset on which a policy is based, and the overrides; ``from_dict`` reads them.

    Raises:
        PolicyError: A module class cannot be found by its name.
    """
    base = preset(policy.name if policy.name in preset_names() else "torch")
    if policy.modules[: len(base.modules)] != base.modules:
        base = preset("torch")
    modules = policy.modules[len(base.modules) :]
    for module in modules:
        module.check_name()
    listed = policy._listed()
    float8, default = dataclasses.asdict(policy.float8), dataclasses.asdict(base.float8)
    entries: dict[str, Any] = {
        "name": policy.name if policy.name != base.name else None,
        "base": base.name,
        "devices": [*policy.tables] if set(policy.tables) != set(base.tables) else None,
        "dtype": {device: dtype_name(dtype) for device, dtype in policy.dtypes},
        "float8": {name: value for name, value in float8.items() if value != default[name]},
        "tables": {
            device: {op: table[op].value for op in sorted(table)}
            for device, table in policy.tables.items()
            if table != with_changes(base.tables.get(device, {}), policy.ops)
        },
        "ops": _joined(
            [{o.pattern: o.policy.value} for o in policy.ops],
            lambda ops: op_overrides(ops, listed) == policy.ops,
        ),
        "modules": _joined(
            [{m.text: {m.op: m.policy.value} if m.op else m.policy.value} for m in modules],
            lambda given: module_overrides(given, listed) == modules,
        ),
        "args": _joined(
            [{a.pattern: dict(a.args)} for a in policy.args],
            lambda args: [*args.items()] == [(a.pattern, dict(a.args)) for a in policy.args],
        ),
    }
    return {key: value for key, value in entries.items() if value is not None and value != {}}


def _joined(
    groups: list[dict[str, Any]], is_equal: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns one mapping if it has the same overrides as the groups, else the groups."""
    merged: dict[str, Any] = {}
    for group in groups:
        for key, value in group.items():
            before = merged.get(key)
            is_of_one_module = isinstance(before, dict) and isinstance(value, dict)
            merged[key] = {**before, **value} if is_of_one_module else value  # type: ignore[dict-item]
    try:
        return merged if is_equal(merged) else groups
    except PolicyError:  # an op with two policies, of which the later one wins
        return groups

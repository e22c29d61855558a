"""Saves and loads policy files, which contain a preset and overrides."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from amp_fx.dtypes import as_dtype, dtype_name
from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.policies import files
from amp_fx.policies.changes import (
    CLASS,
    ModuleOverride,
    OpOverride,
    is_glob,
    module_overrides,
    to_policy,
)
from amp_fx.policies.files import Trust, find_object
from amp_fx.policies.policy import FORMAT, Policy, preset, preset_names, with_changes
from amp_fx.tables.float8 import Float8

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from amp_fx.policies.files import Document

T = TypeVar("T")

_KEYS = (
    "format",
    "name",
    "base",
    "devices",
    "dtype",
    "float8",
    "rules",
    "tables",
    "ops",
    "modules",
    "args",
)


def load(path: str | os.PathLike[str], *, trusted: bool | Iterable[str] = False) -> Policy:
    """Reads a policy file.

    Keys and values are those of ``Policy.with_ops``, ``with_modules`` and ``with_args``. A table
    holds the argument of one call; the tables of several calls are ``[[ops]]``. ``[tables.<device
    type>]`` replaces the table of a device. ``devices`` lists the device types if they differ from
    those of the preset. For example::

        base = "torch"
        dtype = "float16"                    # or: dtype = { cuda = "float16" }
        float8 = { recipe = "rowwise", least_in = 1024, least_out = 1024 }
        rules = ["mypackage.rules:my_rule"]

        [ops]
        softmax = "lower_precision_fp"

        [modules]
        "decoder.*.norm" = "fp32"
        "decoder.0.attn" = { matmul = "fp32" }   # single ops in the module

        [args]
        index_add = { source = "same_as:self" }
    """
    trust = Trust(trusted)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"the policy file {str(path)!r} cannot be read: {error}") from error
    return _Reader(files.Document(text, str(path)), trust).policy()


def loads(text: str, *, trusted: bool | Iterable[str] = False) -> Policy:
    """Reads the text of a policy file."""
    return _Reader(files.Document(text, "policy"), Trust(trusted)).policy()


class _Reader:
    """Converts the entries of one file to calls of ``Policy``'s methods."""

    def __init__(self, document: Document, trust: Trust) -> None:
        self._document = document
        self._trust = trust

    def policy(self) -> Policy:
        data = self._document.data
        for key in data:
            if key not in _KEYS:
                raise self._error((key,), _unknown_key(key))
        self._check_trust(data)
        return self._with_changes(self._base(data), data)

    def _check_trust(self, data: dict[str, Any]) -> None:
        """Raises an error for names that are not trusted, before any module is imported."""
        for where, modules in self._groups(data, "modules"):
            for pattern in modules:
                if pattern.startswith(CLASS):
                    name = pattern.removeprefix(CLASS)
                    self._call((*where, pattern), self._trust.check_class, name)
        for rule in self._rules(data):
            self._call(("rules",), self._trust.check_rule, rule)

    def _rules(self, data: dict[str, Any]) -> list[str]:
        rules: list[Any] = self._checked(("rules",), data.get("rules", []), list, list)
        return [self._checked(("rules",), rule, str, str) for rule in rules]

    def _base(self, data: dict[str, Any]) -> Policy:
        if data.get("format", FORMAT) != FORMAT:
            raise self._error(
                ("format",),
                f"expected {FORMAT}, got {data['format']!r}, a format of another amp_fx version",
            )
        base = self._checked(("base",), data.get("base", "torch"), str, preset)
        name = self._checked(("name",), data.get("name", base.name), str, str)
        devices = self._checked(("devices",), data.get("devices", [*base.tables]), list, list)
        tables = self._checked(("tables",), data.get("tables", {}), dict, dict)
        selected = {device: table for device, table in base.tables.items() if device in devices}
        policy = self._with_float8(dataclasses.replace(base, name=name, tables=selected), data)
        for device, table in tables.items():
            where = ("tables", device)
            entries = self._checked(where, table, dict, dict).items()
            rules = {op: self._call((*where, op), to_policy, op, value) for op, value in entries}
            policy = self._call(where, policy.with_device, device, rules)
        for device in devices:
            if device not in policy.tables:
                raise self._error(("devices",), f"{device!r} has no table in {base.name!r}")
        return policy

    def _with_float8(self, policy: Policy, data: dict[str, Any]) -> Policy:
        given = self._checked(("float8",), data.get("float8", {}), dict, dict)
        fields = {field.name for field in dataclasses.fields(Float8)}
        if unknown := sorted(set(given) - fields):
            allowed = ", ".join(sorted(fields))
            raise self._error(("float8",), f"expected one of {allowed}, got {unknown[0]!r}")
        changed: Policy = self._call(("float8",), functools.partial(policy.with_float8, **given))
        return changed

    def _with_changes(self, policy: Policy, data: dict[str, Any]) -> Policy:
        dtypes = data.get("dtype", {})
        named = dtypes.items() if isinstance(dtypes, dict) else [(None, dtypes)]
        for device, dtype in named:
            where = ("dtype",) if device is None else ("dtype", device)
            policy = self._call(where, policy.with_dtype, _dtype(dtype), device)
        for where, ops in self._groups(data, "ops"):
            policy = self._with_group(policy.with_ops, where, ops)
        added: list[ModuleOverride] = []  # added at once, because each change copies the policy
        for where, modules in self._groups(data, "modules"):
            change = functools.partial(self._module_overrides, policy._listed())
            added += self._with_group(change, where, modules)
        policy = dataclasses.replace(policy, modules=(*policy.modules, *added))
        for where, args in self._groups(data, "args"):
            for op, given in args.items():
                entries = self._checked((*where, op), given, dict, dict)
                policy = self._call((*where, op), policy.with_args, op, entries)
        for rule in self._rules(data):
            policy = self._call(("rules",), policy.with_rule, rule)
        return policy

    def _module_overrides(
        self, listed: Iterable[str], modules: dict[str, Any]
    ) -> tuple[ModuleOverride, ...]:
        """Converts entries like ``with_modules``, but only finds classes that are trusted."""
        return module_overrides(modules, listed, find_class=self._trust.find_class)

    def _groups(self, data: dict[str, Any], key: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
        value = data.get(key, [])
        groups = value if isinstance(value, list) else [value]
        for index, group in enumerate(groups):
            yield (key, index), self._checked((key, index), group, dict, dict)

    def _with_group(
        self, change: Callable[[Any], T], where: tuple[Any, ...], group: dict[str, Any]
    ) -> T:
        try:
            return change(group)
        except PolicyError:
            for key, value in group.items():
                self._call((*where, key), change, {key: value})  # to name the invalid entry
            changed: T = self._call(where, change, group)
            return changed

    def _checked(
        self, where: tuple[Any, ...], value: Any, kind: type, convert: Callable[[Any], Any]
    ) -> Any:
        if not isinstance(value, kind):
            names = {"dict": "a table", "list": "a list", "str": "a string"}
            raise self._error(where, f"expected {names[kind.__name__]}, got {value!r}")
        return self._call(where, convert, value)

    def _call(self, where: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except PolicyError as error:
            raise self._error(where, str(error)) from error

    def _error(self, where: tuple[Any, ...], message: str) -> PolicyError:
        return self._document.error(where, message)


def _dtype(value: object) -> object:
    """Converts the name of a dtype; ``Policy.with_dtype`` rejects other values."""
    return as_dtype(value) or value


def _unknown_key(key: str) -> str:
    return f"unknown key: expected one of {', '.join(_KEYS)}{did_you_mean(key, _KEYS)}"


def save(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Writes a policy file."""
    for override in policy.rules:
        _check_importable(override.function, f"the rule {override.name}")
    for module in policy.modules:
        if isinstance(module.pattern, type):
            _check_importable(module.pattern, f"the class {module.pattern.__name__}")
    Path(path).write_text(to_text(policy), encoding="utf-8")


def _check_importable(obj: Any, what: str) -> None:
    name = _import_name(obj)
    try:
        imported = find_object(name)
    except PolicyError:
        imported = None
    if imported is not obj or name.startswith("__main__"):
        raise PolicyError(
            f"{what} cannot be saved, because policy files contain functions and classes by name, "
            f"and {name!r} does not import it: define it at the top level of a module"
        )


def _import_name(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '?')}:{getattr(obj, '__qualname__', repr(obj))}"


def to_text(policy: Policy) -> str:
    """Returns the text of a policy file. Rules are written even if they cannot be imported."""
    base = preset(policy.name if policy.name in preset_names() else "torch")
    if policy.modules[: len(base.modules)] != base.modules:
        base = preset("torch")
    entries: dict[str, Any] = {"format": FORMAT}
    if policy.name != base.name:
        entries["name"] = policy.name
    entries["base"] = base.name
    if set(policy.tables) != set(base.tables):
        entries["devices"] = [*policy.tables]
    entries |= _dtype_entry(policy)
    if policy.float8 != base.float8:
        entries["float8"] = dataclasses.asdict(policy.float8)
    if policy.rules:
        entries["rules"] = [_import_name(rule.function) for rule in policy.rules]
    tables = {
        device: {op: table[op].value for op in sorted(table)}
        for device, table in policy.tables.items()
        if table != with_changes(base.tables.get(device, {}), policy.ops)
    }
    groups = {
        "ops": _op_groups(policy.ops),
        "modules": _module_groups(policy.modules[len(base.modules) :]),
        "args": _groups_of((a.pattern, dict(a.args)) for a in policy.args),
    }
    comments = {(m.text, m.op): m.why for m in policy.modules if m.why}
    return files.to_text(entries, tables, groups, _comments(groups["modules"], comments))


def _comments(
    groups: list[dict[str, Any]], reasons: dict[tuple[str, str], str]
) -> dict[tuple[str, int, str], list[str]]:
    """Returns the reasons of module overrides by entry; those of single ops begin with the op."""
    comments: dict[tuple[str, int, str], list[str]] = {}
    for index, group in enumerate(groups):
        for pattern, value in group.items():
            ops = list(value) if isinstance(value, dict) else [""]
            lines = [(op, reasons[pattern, op]) for op in ops if (pattern, op) in reasons]
            has_several_ops = len(ops) > 1
            comments["modules", index, pattern] = [
                f"{op}: {why}" if has_several_ops else why for op, why in lines
            ]
    return comments


def _module_groups(overrides: Iterable[ModuleOverride]) -> list[dict[str, Any]]:
    """Groups module overrides in order; overrides of several ops in one module are one entry."""
    groups: list[dict[str, Any]] = []
    for override in overrides:
        last = next(reversed(groups[-1].items()), ("", None)) if groups else ("", None)
        value = {override.op: override.policy.value} if override.op else override.policy.value
        joins = last[0] == override.text and isinstance(last[1], dict) and isinstance(value, dict)
        if joins and override.op not in last[1]:  # type: ignore[operator]
            last[1].update(value)  # type: ignore[union-attr]
            continue
        if not groups or override.text in groups[-1]:
            groups.append({})
        groups[-1][override.text] = value
    return groups


def _dtype_entry(policy: Policy) -> dict[str, Any]:
    dtypes = {device: dtype_name(dtype) for device, dtype in policy.dtypes}
    if not dtypes:
        return {}
    is_one = set(dtypes) == set(policy.tables) and len(set(dtypes.values())) == 1
    return {"dtype": next(iter(dtypes.values())) if is_one else dtypes}


def _groups_of(entries: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Groups entries in order into as few tables as possible, as keys in a table are unique."""
    groups: list[dict[str, Any]] = []
    for key, value in entries:
        if not groups or key in groups[-1]:
            groups.append({})
        groups[-1][key] = value
    return groups


def _op_groups(overrides: Iterable[OpOverride]) -> list[dict[str, Any]]:
    """Groups op overrides; each group is the argument of one ``with_ops``."""
    groups: list[list[OpOverride]] = []
    for override in overrides:
        if not groups or not _may_join(override, groups[-1]):
            groups.append([])
        groups[-1].append(override)
    return [{o.pattern: o.policy.value for o in group} for group in groups]


def _may_join(override: OpOverride, group: list[OpOverride]) -> bool:
    if is_glob(override.pattern) and not is_glob(group[-1].pattern):
        return False
    alike = [o for o in group if is_glob(o.pattern) == is_glob(override.pattern)]
    return not any(
        o.pattern == override.pattern
        or (o.policy is not override.policy and {*o.overloads} & {*override.overloads})
        for o in alike
    )

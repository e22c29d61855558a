"""Reads and writes the TOML of policy files, and resolves the dotted names in them.

``saved`` interprets the entries. Importing a module runs its code, and rules are functions that are
called. Names in files are therefore only resolved if the reader trusts them (``Trust``).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from amp_fx.errors import PolicyError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HEAD = """\
# A policy of amp_fx: a preset and overrides. Later overrides win over earlier ones, overrides of
# modules over those of ops, and rules over both. `python -m amp_fx policy` lists ops and policies.
"""


class Document:
    """The contents of a policy file.

    Attributes:
        data: The entries, as parsed by ``tomllib``.
    """

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Integers with too many digits raise a ValueError, like invalid TOML.
            raise PolicyError(f"{source} is not valid TOML: {error}") from error

    def error(self, where: tuple[Any, ...], message: str) -> PolicyError:
        """Returns an error about one entry, with its line and key."""
        line = _line_of(self._text, where)
        location = f", line {line}" if line else ""
        key = ".".join(str(part) for part in where if not isinstance(part, int))
        return PolicyError(f"{self._source}{location}, key {key!r}: {message}")


_HEADER = re.compile(r"\s*\[+([^\]]*)\]")
_ENTRY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[\w.-]+)\s*=""")


def _line_of(text: str, where: tuple[Any, ...]) -> int | None:
    """Returns the 1-based line of an entry, or of its table if the entry has none."""
    index = next((part for part in where if isinstance(part, int)), 0)
    parts = [part for part in where if not isinstance(part, int)]
    section: list[str] = []
    seen: dict[str, int] = {}
    line_number = None
    for number, line in enumerate(text.splitlines(), 1):
        header, entry = _HEADER.match(line), _ENTRY.match(line)
        if header is not None:
            section = [_plain_key(part.strip()) for part in header[1].split(".", 1)]
            seen[section[0]] = seen.get(section[0], -1) + 1
        path = [*section, *([_plain_key(entry[1])] if entry and header is None else [])]
        is_group = len(section) != 1 or seen.get(section[0], 0) == index
        if path and is_group and parts[: len(path)] == path:
            line_number = number
            if path == parts:
                return number
    return line_number


def _plain_key(key: str) -> str:
    if key.startswith('"'):
        return str(json.loads(key))
    return key.strip("'")


def to_text(
    entries: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, str]],
    groups: Mapping[str, list[dict[str, Any]]],
    comments: Mapping[tuple[str, int, str], list[str]] | None = None,
) -> str:
    """Returns the text of a policy file.

    Args:
        entries: Entries at the top of the file.
        tables: Contents of ``[tables.<device type>]``.
        groups: Tables that can be repeated, by key.
        comments: Lines above an entry of a group, by the key and index of the group and the entry.
    """
    comments = comments or {}
    lines = [_HEAD.rstrip(), *(f"{key} = {_value(value)}" for key, value in entries.items())]
    for device, table in tables.items():
        lines += ["", f"[tables.{_key(device)}]", *_entry_lines(table)]
    for key, group_tables in groups.items():
        header = f"[{key}]" if len(group_tables) == 1 else f"[[{key}]]"
        for index, group in enumerate(group_tables):
            lines += ["", header]
            for entry, line in zip(group, _entry_lines(group), strict=True):
                lines += [_comment(text) for text in comments.get((key, index, entry), ())]
                lines.append(line)
    return "\n".join(lines) + "\n"


def _entry_lines(entries: Mapping[str, Any]) -> Iterable[str]:
    return (f"{_key(key)} = {_value(value)}" for key, value in entries.items())


def _comment(text: str) -> str:
    return f"# {' '.join(text.split())}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    return "{ " + ", ".join(_entry_lines(value)) + " }"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    """Returns a basic string of TOML: a JSON string in which DEL is escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def find_object(name: str) -> Any:
    """Resolves a dotted name, and imports modules if necessary."""
    parts = name.replace(":", ".").split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        except (Exception, SystemExit) as error:
            raise PolicyError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        try:
            for part in parts[split:]:
                value = getattr(value, part)
        except AttributeError:
            break
        return value
    raise PolicyError(f"{name!r} cannot be imported: expected a name like 'package.module:name'")


class Trust:
    """The names that a policy file may import.

    Args:
        trusted: True for all names, False for none, or names of modules. A module includes its
            submodules.
    """

    def __init__(self, trusted: bool | Iterable[str]) -> None:
        self._is_all = trusted is True
        if isinstance(trusted, str):
            raise PolicyError(f"expected trusted to be a list of module names, got {trusted!r}")
        self._modules = () if isinstance(trusted, bool) else tuple(trusted)

    def check_rule(self, name: str) -> None:
        """Raises an error if a function is not trusted."""
        if not self._allows(name):
            raise PolicyError(
                f"{name!r} is a function that would be called: {_HOW.format(_module_of(name))}"
            )

    def check_class(self, name: str) -> None:
        """Raises an error if a class is not trusted and its module is not imported yet."""
        if not self._allows(name) and _imported(name) is None:
            module = _module_of(name)
            raise PolicyError(
                f"{name!r} is not in a module that is already imported: import {module} before, "
                f"or, {_HOW.format(module)}"
            )

    def find_class(self, name: str) -> Any:
        """Returns the class with a name that ``check_class`` accepted."""
        cls = _imported(name)
        return find_object(name) if cls is None else cls

    def _allows(self, name: str) -> bool:
        dotted = name.replace(":", ".")
        return self._is_all or any(dotted.startswith(f"{module}.") for module in self._modules)


_HOW = "to trust the file, call amp_fx.Policy.load(path, trusted=True), or with trusted=[{!r}]"


def _module_of(name: str) -> str:
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def _imported(name: str) -> Any:
    """Resolves a name in modules that are already imported; returns None if it is not found.

    Only ``__dict__`` is read, because a module's ``__getattr__`` may import other modules.
    """
    parts = name.replace(":", ".").split(".")
    for split in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:split]))
        for part in parts[split:]:
            value = getattr(value, "__dict__", {}).get(part)
        if value is not None:
            return value
    return None

"""Policy files as text and as plain data: TOML that a person edits, with the lines of entries.

What the entries mean is for ``saved`` to know.

Resolves the dotted names in files, too, and decides which of them may be imported.
Importing a module runs it, and a rule is a function that will be called: a file that somebody
else wrote does neither unless its reader says so.
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
# A policy of amp_fx: a preset, and what is changed on top of it. Later beats earlier, a module
# beats an op, and a rule beats both. `python -m amp_fx policy` lists ops and what the words mean.
"""


class Document:
    """A policy file that was read.

    Attributes:
        data: Its entries, as ``tomllib`` gives them.
    """

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # An integer of more digits than Python reads is a ValueError, as wrong TOML is.
            raise PolicyError(f"{source} is not valid TOML: {error}") from error

    def error(self, where: tuple[Any, ...], message: str) -> PolicyError:
        """An error about one entry, with its line and key."""
        line = _line_of(self._text, where)
        place = f", line {line}" if line else ""
        key = ".".join(str(part) for part in where if not isinstance(part, int))
        return PolicyError(f"{self._source}{place}, key {key!r}: {message}")


_HEADER = re.compile(r"\s*\[+([^\]]*)\]")
_ENTRY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[\w.-]+)\s*=""")


def _line_of(text: str, where: tuple[Any, ...]) -> int | None:
    """The number of the line with an entry, from 1; that of its table, if it is not found."""
    index = next((part for part in where if isinstance(part, int)), 0)
    parts = [part for part in where if not isinstance(part, int)]
    section: list[str] = []
    seen: dict[str, int] = {}
    found = None
    for number, line in enumerate(text.splitlines(), 1):
        header, entry = _HEADER.match(line), _ENTRY.match(line)
        if header is not None:
            section = [_plain_key(part.strip()) for part in header[1].split(".", 1)]
            seen[section[0]] = seen.get(section[0], -1) + 1
        path = [*section, *([_plain_key(entry[1])] if entry and header is None else [])]
        is_group = len(section) != 1 or seen.get(section[0], 0) == index
        if path and is_group and parts[: len(path)] == path:
            found = number
            if path == parts:
                return number
    return found


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
    """The text of a policy file.

    Args:
        entries: What stands at the top.
        tables: ``[tables.<device type>]``.
        groups: Tables that may stand several times, by key.
        comments: Lines above an entry of a group, by the group's key, its number and the entry.
    """
    comments = comments or {}
    lines = [_HEAD.rstrip(), *(f"{key} = {_value(value)}" for key, value in entries.items())]
    for device, table in tables.items():
        lines += ["", f"[tables.{_key(device)}]", *_entry_lines(table)]
    for key, several in groups.items():
        header = f"[{key}]" if len(several) == 1 else f"[[{key}]]"
        for index, group in enumerate(several):
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
    """A basic string of TOML, which is one of JSON but for a character that both may escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def find_object(name: str) -> Any:
    """Resolves a dotted name; imports what it must."""
    parts = name.replace(":", ".").split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        except (Exception, SystemExit) as error:
            raise PolicyError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        try:
            for part in parts[split:]:
                found = getattr(found, part)
        except AttributeError:
            break
        return found
    raise PolicyError(f"{name!r} cannot be imported; write it like 'package.module:name'")


class Trust:
    """Describes what the reader of a policy file allows it to import.

    Args:
        trusted: True for everything, False for nothing, or the names of modules, each of which
            stands for what is inside of it as well.
    """

    def __init__(self, trusted: bool | Iterable[str]) -> None:
        self._is_all = trusted is True
        if isinstance(trusted, str):
            raise PolicyError(f"trusted={trusted!r}: give the names of modules as a list")
        self._modules = () if isinstance(trusted, bool) else tuple(trusted)

    def check_rule(self, name: str) -> None:
        """Refuses a function that is not trusted."""
        if not self._allows(name):
            raise PolicyError(
                f"{name!r} is a function that would be called; {_HOW.format(_module_of(name))}"
            )

    def check_class(self, name: str) -> None:
        """Refuses a class whose module would have to be imported, and is not trusted."""
        if not self._allows(name) and _imported(name) is None:
            module = _module_of(name)
            raise PolicyError(
                f"{name!r} cannot be found in the modules that are imported already, and would be "
                f"imported; import {module} before, or {_HOW.format(module)}"
            )

    def find_class(self, name: str) -> Any:
        """The class of a name, which ``check_class`` has passed."""
        found = _imported(name)
        return find_object(name) if found is None else found

    def _allows(self, name: str) -> bool:
        dotted = name.replace(":", ".")
        return self._is_all or any(dotted.startswith(f"{module}.") for module in self._modules)


_HOW = "to trust the file: amp_fx.Policy.load(path, trusted=True), or trusted=[{!r}]"


def _module_of(name: str) -> str:
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def _imported(name: str) -> Any:
    """Resolves a name in a module that is imported; returns None if there is none.

    No attribute is made for the question, as a module's ``__getattr__`` may import others.
    """
    parts = name.replace(":", ".").split(".")
    for split in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, "__dict__", {}).get(part)
        if found is not None:
            return found
    return None

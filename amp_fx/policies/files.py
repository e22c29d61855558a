"""Reads and writes policy files, which are TOML."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_fx.errors import PolicyError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_HEAD = """\
# A policy of amp_fx: a preset and overrides. Later overrides win over earlier ones, and overrides
# of modules over those of ops. `python -m amp_fx policy` lists ops and policies.
"""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the entries of a policy file.

    Raises:
        PolicyError: The file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"it cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        # Integers with too many digits raise a ValueError, like invalid TOML.
        raise PolicyError(f"it is not valid TOML: {error}") from error


def write(entries: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the entries of a policy to a file."""
    Path(path).write_text(to_text(entries), encoding="utf-8")


def to_text(entries: Mapping[str, Any]) -> str:
    """Returns the text of a policy file."""
    # Plain values come first, because TOML assigns what follows a header to its table.
    lines = [
        f"{_key(key)} = {_value(value)}"
        for key, value in entries.items()
        if not isinstance(value, dict) and not _is_groups(value)
    ]
    for key, value in entries.items():
        if key == "tables":  # one section per device, because a table has hundreds of entries
            for device, table in value.items():
                lines += _section(f"[tables.{_key(device)}]", table)
        elif isinstance(value, dict):
            lines += _section(f"[{_key(key)}]", value)
        elif _is_groups(value):
            for group in value:
                lines += _section(f"[[{_key(key)}]]", group)
    return _HEAD + "\n".join(lines) + "\n"


def _is_groups(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(group, dict) for group in value)


def _section(header: str, entries: Mapping[str, Any]) -> list[str]:
    return ["", header, *(f"{_key(key)} = {_value(value)}" for key, value in entries.items())]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # A JSON string is a basic string of TOML, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    return str(value)

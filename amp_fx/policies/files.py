"""The entries of a policy as plain data, and as the TOML of a policy file."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.tables.float8 import Float8

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_KINDS: Mapping[str, tuple[type, ...]] = {
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

_NAMES: Mapping[type, str] = {str: "a string", list: "a list", dict: "a table"}

_HEAD = """\
# A policy of amp_fx: a preset and overrides. Later overrides win over earlier ones, and overrides
# of modules over those of ops. `python -m amp_fx policy` lists ops and policies.
"""


def check_entries(entries: Mapping[str, Any]) -> None:
    """Checks the keys of a policy, and the types of their values.

    Raises:
        PolicyError: A key is unknown, or its value has another type.
    """
    for key, value in entries.items():
        if key not in _KINDS:
            meant = did_you_mean(key, _KINDS)
            raise PolicyError(f"unknown key {key!r}: expected one of {', '.join(_KINDS)}{meant}")
        _check(key, value, _KINDS[key])
        for group in value if isinstance(value, list) and dict in _KINDS[key] else ():
            _check(key, group, (dict,))
    for device, table in entries.get("tables", {}).items():
        _check(f"tables.{device}", table, (dict,))
    allowed = [field.name for field in dataclasses.fields(Float8)]
    for name in entries.get("float8", {}):
        if name not in allowed:
            raise PolicyError(f"key 'float8': expected one of {', '.join(allowed)}, got {name!r}")


def _check(key: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise PolicyError(f"key {key!r}: expected {expected}, got {value!r}")


def groups_of(entries: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the arguments of the calls that an entry represents, in order."""
    value = entries.get(key, [])
    return value if isinstance(value, list) else [value]


def merge_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one mapping with the entries of several; later ones win."""
    merged: dict[str, Any] = {}
    for key, value in (item for group in groups for item in group.items()):
        before: Any = merged.get(key)
        is_of_one_module = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = {**before, **value} if is_of_one_module else value
    return merged


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
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


def to_toml(entries: Mapping[str, Any]) -> str:
    """Returns the text of a policy file."""
    plain, sections = [_HEAD.rstrip()], []
    for key, value in entries.items():
        if key == "tables":  # one section per device, because a table has hundreds of entries
            for device, table in value.items():
                sections += _section(f"[tables.{_key(device)}]", table)
        elif isinstance(value, dict):
            sections += _section(f"[{_key(key)}]", value)
        elif isinstance(value, list) and key != "devices":
            for group in value:
                sections += _section(f"[[{_key(key)}]]", group)
        else:
            plain.append(f"{_key(key)} = {_value(value)}")
    # Plain values come first, because TOML assigns what follows a header to its table.
    return "\n".join([*plain, *sections]) + "\n"


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

"""Resolves the dotted names in policy files, and decides which of them may be imported.

Importing a module runs it, and a rule is a function that will be called: a file that somebody
else wrote does neither unless its reader says so.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from amp_fx.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable


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

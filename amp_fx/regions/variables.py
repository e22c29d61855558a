"""Values in the variables of a function or a bound method, by name."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def variables_of(program: Any) -> list[tuple[str, Any]]:
    """Returns the values that a program can use without receiving them as arguments, by name.

    These are the values of closure variables, of globals that its code names, of defaults, of the
    arguments of a ``functools.partial`` and of the attributes of the object to which a method is
    bound; and the items of lists, tuples and dictionaries among them.
    """
    found = list(_own_variables(program))
    return [*found, *(item for name, value in found for item in items_of(name, value))]


def items_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of a list, tuple or dictionary: ``models.0``."""
    if isinstance(value, (list, tuple)):
        yield from ((f"{name}.{index}", item) for index, item in enumerate(value))
    elif type(value) is dict:
        yield from ((f"{name}.{key}", item) for key, item in value.items())


def _own_variables(program: Any) -> Iterator[tuple[str, Any]]:
    function: Any = inspect.unwrap(program) if callable(program) else program
    owner = getattr(program, "__self__", None)
    yield "", program
    if owner is not None:
        yield "self", owner
    if owner is not None and not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).items()
    if isinstance(program, functools.partial):
        yield from _own_variables(program.func)
        yield from ((f"args.{index}", value) for index, value in enumerate(program.args))
        yield from program.keywords.items()
    code = getattr(function, "__code__", None)
    if code is None:
        return
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    known = getattr(function, "__globals__", {})
    yield from ((name, known[name]) for name in code.co_names if name in known)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if has_content(cell))


def has_content(cell: Any) -> bool:
    """Returns True if a variable of an enclosing function has a value."""
    try:
        cell.cell_contents  # noqa: B018 - empty cells raise
    except ValueError:
        return False
    return True

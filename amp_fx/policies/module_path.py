"""The grammar of module paths: what ``explain`` prints and what patterns are matched against.

A path begins at the compiled module: ``decoder.0.norm``. Where a function is compiled, a module
that it calls has its path from the outermost module that is called (``0.norm``, the same in
eager code) and a name that begins with the variable that holds that (``decoder.0.norm``): the
name is printed, and patterns fit either.
"""

from __future__ import annotations

import re
from typing import TypeAlias

ModuleEntry: TypeAlias = "tuple[str, type | str, str]"
"""A module's path, its class, and its name: the path, in a compiled function from a variable on.

A class is a name where a graph was exported and its classes are not at hand."""

ModuleStack: TypeAlias = tuple[ModuleEntry, ...]
"""The modules around an op, outermost first."""

_ITEM = re.compile(
    r"""\._(?:modules|parameters|buffers)\[(['"])(.*?)\1\]|\[(['"])(.*?)\3\]|\[(\d+)\]"""
)
_CLOSURE = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
"""A variable that a function has from around it: told by the function's own name."""

_WRAPPED = re.compile(r"^(self|fn|mod)(\.|$)")
"""How Dynamo calls the compiled module itself."""


def path_of(stack: ModuleStack) -> str:
    """The path of the innermost module; empty in the outermost one, and outside of any."""
    return stack[-1][0] if stack else ""


def name_of(stack: ModuleStack) -> str:
    """The same as it is printed."""
    return stack[-1][2] if stack else ""


def module_path(name: str) -> str:
    """``model.layers.0`` for ``L['model']._modules['layers']._modules['0']``, Dynamo's name.

    The ``self`` of a compiled method is left out.
    """
    name = _CLOSURE.sub("", name)
    plain = _ITEM.sub(lambda m: f".{m[2] or m[4] or m[5]}", name)
    return _WRAPPED.sub("", re.sub(r"^[LG](\.|$)", "", plain)).lstrip(".")


def join_path(*parts: str) -> str:
    """Parts of a path, empty ones left out."""
    return ".".join(filter(None, parts))

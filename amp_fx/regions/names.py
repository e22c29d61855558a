"""Converts Dynamo's names of variables to paths of modules."""

from __future__ import annotations

import re

_ITEM = re.compile(
    r"""\._(?:modules|parameters|buffers)\[(['"])(.*?)\1\]|\[(['"])(.*?)\3\]|\[(\d+)\]"""
)
_CLOSURE = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
"""A closure variable in a name of Dynamo's, which the name of the function precedes."""

_WRAPPED = re.compile(r"^(self|fn|mod)(\.|$)")
"""Dynamo's names for the compiled module itself."""


def plain_name(name: str) -> str:
    """Converts a name of Dynamo's to parts that are separated by dots.

    ``L['model']._modules['layers']._modules['0']`` becomes ``L.model.layers.0``.
    """
    return _ITEM.sub(lambda m: f".{m[2] or m[4] or m[5]}", _CLOSURE.sub("", name))


def module_path(name: str) -> str:
    """Converts a name of Dynamo's to a module path, without the ``self`` of a compiled method.

    ``L['model']._modules['layers']._modules['0']`` becomes ``model.layers.0``.
    """
    return _WRAPPED.sub("", re.sub(r"^[LG](\.|$)", "", plain_name(name))).lstrip(".")


def join_path(*parts: str) -> str:
    """Joins the parts of a path that are not empty."""
    return ".".join(filter(None, parts))

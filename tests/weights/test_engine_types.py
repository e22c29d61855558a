"""The types of the C++ extension name what it has, and nothing else."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import pytest

from amp_fx import csrc
from amp_fx.weights.watch import engine
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs.WATCH

STUB = csrc.SOURCE.with_name("engine.pyi")


def named(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


CLASSES = {
    node.name: set(named(node))
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
}


def public(value: Any) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_names(name: str) -> None:
    value = engine() if name == "Engine" else getattr(engine(), name)
    assert CLASSES[name] == public(value)

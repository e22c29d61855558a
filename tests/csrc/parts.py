"""A compiled part that is built within a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """\
#include <Python.h>
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, nullptr}};
PyMODINIT_FUNC PyInit_{name}() {{
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", 42);
  return module;
}}
"""


def write_part(folder: Path, name: str) -> Path:
    """Writes the source of a module whose ``answer`` is 42."""
    source = folder / f"{name}.cpp"
    source.write_text(SOURCE.format(name=name))
    return source

"""``python -m amp_fx env``: shows versions, devices and tools."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from amp_fx import __version__, csrc
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.csrc.build import find
from amp_fx.devices.low_dtypes import bfloat16_units
from amp_fx.dtypes import dtype_name
from amp_fx.options import default_dtype
from amp_fx.regions.state import autocast_device_types
from amp_fx.reports import piped_width

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

PACKAGES = ("networkx", "graphviz", "rich", "numpy", "transformers", "accelerate", "lightning")

WITHOUT = "weights are cast per call"
"""Consequence of a missing extension."""


def run(_: argparse.Namespace) -> int:
    """Prints the table and returns 0."""
    table = Table.grid(padding=(0, 2))
    sections = [versions, tools, extension, devices]
    for section in sections:
        for row in section():
            table.add_row(*row)
    Console(highlight=False, markup=False, width=piped_width()).print(table)
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yields the versions of Python, the platform and packages."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "amp_fx", __version__
    yield "torch", torch.__version__
    yield from ((name, _version(name)) for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def tools() -> Iterator[tuple[str, str]]:
    """Yields the programs that inductor and drawings need."""
    compiler = "missing: inductor needs one on CPU"
    if has_cpp_compiler():
        from amp_fx.torch_private.inductor_build import get_cpp_compiler

        compiler = get_cpp_compiler()
    yield "C++ compiler", compiler
    yield "dot", shutil.which("dot") or "missing: pictures need Graphviz"


def extension() -> Iterator[tuple[str, str]]:
    """Yields the path of the extension, or the consequence of a missing one."""
    source = csrc.SOURCE
    path = find(csrc.NAME, source)
    if csrc.why_off():
        yield source.name, f"not used: {csrc.why_off()}; {WITHOUT}"
    elif path is not None:
        yield source.name, str(path)
    elif has_cpp_compiler():
        yield source.name, "built on first use, or by: python -m amp_fx build"
    else:
        yield source.name, f"cannot be built without a compiler; {WITHOUT}"


def devices() -> Iterator[tuple[str, str]]:
    """Yields the devices of this machine, with their autocast dtypes."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = ", ".join(bfloat16_units())
    units = f"bfloat16 units: {names}" if names else "no bfloat16 units"
    yield "cpu", f"{capability}, {units}, autocast to {dtype_name(default_dtype('cpu'))}"
    for name in autocast_device_types():
        if name in ("cpu", "privateuseone"):
            continue
        module = getattr(torch, name, None)
        if module is None or not module.is_available():
            yield name, "not available; can be explained (device_type)"
            continue
        # An out-of-tree device may have no names.
        name_of = getattr(module, "get_device_name", lambda i, name=name: f"{name}:{i}")
        devices = [name_of(i) for i in range(module.device_count())]
        yield name, f"{', '.join(devices)}, autocast to {dtype_name(default_dtype(name))}"

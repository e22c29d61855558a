"""The wheel: every file of the package is in it, and it works far away from its source tree."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import amp_fx

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "amp_fx", "passes")

IMPORT_FROM_TARGET = """
import importlib.metadata, pathlib, sys
import torch._dynamo
import amp_fx.passes

target = pathlib.Path(sys.argv[1])
assert pathlib.Path(amp_fx.__file__).is_relative_to(target), amp_fx.__file__
assert pathlib.Path(amp_fx.passes.__file__).is_relative_to(target), amp_fx.passes.__file__
[dist] = importlib.metadata.distributions(name="amp_fx", path=[str(target)])
[entry] = dist.entry_points.select(group="torch_dynamo_backends")
assert "amp_fx" in torch._dynamo.list_backends()
assert torch._dynamo.lookup_backend("amp_fx") is entry.load()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel built from a copy, so that no stale build folder of the tree can feed it."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    _python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    [path] = out.glob("*.whl")
    return path


def _python(*args: str | Path, cwd: Path, pythonpath: Path | None = None) -> None:
    env = os.environ | ({"PYTHONPATH": str(pythonpath)} if pythonpath else {})
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _files_in_tree() -> set[str]:
    """Every file of the package by its path in a wheel; the link to the passes is followed."""
    folders = os.walk(ROOT / "amp_fx", followlinks=True)
    paths = {Path(folder, name) for folder, _, names in folders for name in names}
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


def test_wheel_holds_every_file(wheel: Path) -> None:
    """The build finds packages by itself: one without ``__init__.py`` is missing."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == _files_in_tree()


@pytest.mark.slow
def test_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    _python(*install, cwd=tmp_path)
    _python("-c", IMPORT_FROM_TARGET, target, cwd=tmp_path, pythonpath=target)


def test_passes_are_linked_into_the_package() -> None:
    """Without the link neither the build, an uninstalled tree nor a type checker finds them."""
    assert (ROOT / "amp_fx/passes").readlink() == Path("../passes")


def test_importing_it_imports_neither_dynamo_nor_sympy() -> None:
    """Importing them takes longer than everything else; torch does it when it compiles."""
    program = "import sys, torch; known = set(sys.modules); "
    program += "from amp_fx import GradScaler, Policy, autocast, compile; "
    program += "new = set(sys.modules) - known; "
    program += "sys.exit('sympy' in new or 'amp_fx.torch_private.dynamo' in new)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_version_is_that_of_the_newest_release_notes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", text, re.MULTILINE)
    assert newest is not None
    assert newest[1] == amp_fx.__version__


def required(name: str, extras: frozenset[str], found: set[str]) -> set[str]:
    """Names of the distributions that one needs, and those that they need, as installed."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        needed = canonicalize_name(requirement.name)
        if needed not in found:
            found.add(needed)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                required(needed, frozenset(requirement.extras), found)
    return found


def test_the_lock_file_pins_all_that_is_installed() -> None:
    """Excludes dependencies of torch, of which `make torch-env` installs other versions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    here = {
        canonicalize_name(pin.name): pin.specifier
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }
    extras = frozenset({"dev", "docs", "models", "notebooks", "test"})
    needed = required("amp_fx", extras, set())
    assert len(needed) > 100
    of_torch = re.compile("triton|setuptools|nvidia-.*|cuda-.*")
    assert [name for name in sorted(needed - {*here}) if not of_torch.fullmatch(name)] == []

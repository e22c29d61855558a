"""The layout: imports between folders, private names of torch, docstrings and class names."""

from __future__ import annotations

import ast
import collections
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx  # type: ignore[import-untyped]
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1] / "amp_fx"

ORDER = (
    ("torch_private", "replaced"),
    ("errors", "dtypes", "csrc", "progress", "random_states", "reports", "second_call"),
    ("devices",),
    ("tables",),
    ("policies",),
    ("regions",),
    ("graphs",),
    ("eager",),
    ("weights",),
    ("passes",),
    ("options",),
    ("backend", "stats", "weight_cache"),
    ("front", "grad_scaler"),
    ("exporting",),
    ("explanation", "integrations"),
    ("observe",),
    ("numerics", "accelerators"),
    ("stored", "drawing"),
    ("commands",),
    ("__main__", "pytest"),
)
"""Folders, and files at the top, by layer: each may import its own layer and those before it."""

LAYER = {name: layer for layer, names in enumerate(ORDER) for name in names}


def modules() -> list[Path]:
    folders = (path for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name[0] != "_")
    files = [path for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    return files + [path for folder in folders for path in folder.rglob("*.py")]


def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def room(module: str) -> str:
    """``graphs`` for ``amp_fx.graphs.values``; ``""`` for ``amp_fx`` itself."""
    return [*module.split("."), ""][1]


def imported(text: str) -> Iterator[tuple[int, str]]:
    """Lines and modules of amp_fx that a text imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_package = (ROOT.parent / module.replace(".", "/")).is_dir()
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, m) for m in (names if is_package else [module]))


def wrong_edges(where: str, text: str) -> list[str]:
    """Imports of a layer above, or of another folder of the same layer."""
    found = []
    for line, module in imported(text):
        if module.split(".")[0] != "amp_fx" or module == "amp_fx.__version__":
            continue
        target = room(module)
        is_same_layer = LAYER.get(target) == LAYER[where]
        are_folders = (ROOT / where).is_dir() and (ROOT / target).is_dir()
        is_between_folders = is_same_layer and where != target and are_folders
        if LAYER.get(target, len(ORDER)) > LAYER[where] or is_between_folders:
            found.append(f"line {line}: {where} imports {module}")
    return found


def test_every_file_has_a_layer() -> None:
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in modules()}
    assert names == set(LAYER)


def test_nothing_imports_a_layer_above() -> None:
    found = {
        str(path.relative_to(ROOT)): edges
        for path in modules()
        if (edges := wrong_edges(path.relative_to(ROOT).parts[0].removesuffix(".py"), source(path)))
    }
    assert found == {}


FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "_")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def circles(texts: Mapping[str, str]) -> list[set[str]]:
    """Modules that import each other, by the texts of modules by name."""
    graph = nx.DiGraph()
    for module, text in texts.items():
        targets = {target for _, target in imported(text)}
        graph.add_edges_from((module, target) for target in targets if target in texts)
    parts = nx.strongly_connected_components(graph)
    return [part for part in parts if len(part) > 1 or graph.has_edge(*[*part] * 2)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_have_no_circle_of_imports(folder: str) -> None:
    """Counts imports for types and imports inside functions, too."""
    paths = (ROOT / folder).rglob("*.py")
    assert circles({name_of(path): source(path) for path in paths}) == []


def private_names(text: str) -> set[str]:
    """Names of torch that begin with ``_``, by which a text imports or reads them."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch._"):
                found.add(name)
    return {name for name in found if "._" in name.replace(".__", ".")}


ALLOWED = {"torch._dynamo.graph_break", "torch._dynamo"}
"""Dynamo must meet this one by its own name in ``PolicyMode``, which it traces."""


def test_private_names_of_torch_are_used_through_one_folder() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in modules()
        if "torch_private" not in path.parts and (names := private_names(source(path)) - ALLOWED)
    }
    assert found == {}


FIRST_WORDS = ("What", "Whether", "Where", "How", "Which", "Who", "Lets", "Has", "Is")


def test_docstrings_open_with_what_a_thing_does_or_is() -> None:
    """Requires PyTorch's style: ``Returns True if ...``, not ``Whether ...``."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    nodes = [n for path in modules() for n in ast.walk(ast.parse(source(path)))]
    texts = [text for n in nodes if isinstance(n, kinds) and (text := ast.get_docstring(n))]
    assert [text for text in texts if text.split()[0].strip(",") in FIRST_WORDS] == []


def test_class_names_are_unique() -> None:
    defined = [
        (node.name, str(path.relative_to(ROOT)))
        for path in modules()
        for node in ast.walk(ast.parse(source(path)))
        if isinstance(node, ast.ClassDef)
    ]
    counts = collections.Counter(name for name, _ in defined)
    assert [place for place in sorted(defined) if counts[place[0]] > 1] == []

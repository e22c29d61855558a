"""page: what a model is named does not become markup or code."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import amp_fx

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("dot") is None, reason="needs the dot program")

NAMES = (
    "@DATA@",
    "@VIEWS@",
    "@TITLE@ @SUMMARY@",
    'x" onmouseover=alert(1) y="',
    "</script><script>alert(2)</script>",
    "</template><img src=x onerror=alert(3)>",
    "\\1 \\g<0>",
)


class Reader(HTMLParser):
    """Collects attributes and scripts, templates' contents included."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)


def test_names_stay_names(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(4, 4))
    path = tmp_path / "page.html"
    amp_fx.draw(amp_fx.explain(model)(torch.randn(2, 4)), path)
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert not [name for name in reader.attributes if name.startswith("on")]
    assert "img" not in reader.tags
    assert reader.tags.count("script") == 2
    data, code = reader.scripts
    modules = {node["module"] for node in json.loads(data)["after"]}
    assert set(NAMES[:-1]) <= modules  # Dynamo escapes the backslashes of the last
    assert "alert" not in code


def width_of(png: Path) -> int:
    """Of a picture, out of its header."""
    return int.from_bytes(png.read_bytes()[16:20], "big")


def test_pictures_of_dots_are_as_fine_as_asked(tmp_path: Path) -> None:
    explanation = amp_fx.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    for dpi in (96, 192):
        amp_fx.draw(explanation, tmp_path / f"{dpi}.png", dpi=dpi)
    amp_fx.draw(explanation, tmp_path / "default.png")
    assert width_of(tmp_path / "192.png") == pytest.approx(2 * width_of(tmp_path / "96.png"), abs=2)
    assert width_of(tmp_path / "default.png") == width_of(tmp_path / "192.png")
    with pytest.raises(amp_fx.errors.DrawError, match="dpi=0"):
        amp_fx.draw(explanation, tmp_path / "none.png", dpi=0)


class Broken(nn.Module):
    """Two graphs: the second module is only in the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        y: torch.Tensor = self.second(x)
        return y


def test_boxes_stand_for_nodes_of_their_module(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with torch.no_grad():
        explanation = amp_fx.explain(Broken())(torch.randn(2, 4))
    amp_fx.draw(explanation, path, focus="second")
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    data = json.loads(reader.scripts[0])
    modules = {node["key"]: node["module"] for node in data["after"]}
    pictures = {name: boxes for name, boxes in data["boxes"].items() if name.startswith("second|")}
    assert pictures
    for boxes in pictures.values():
        known = [modules[key] for keys in boxes.values() for key in keys if key in modules]
        assert any(module.startswith("second") for module in known)
        assert not any(module.startswith("first") for module in known)

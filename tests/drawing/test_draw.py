"""Pictures contain what they should, nothing in them overlaps, and they are written to files."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.drawing.boxes import levels
from amp_fx.drawing.folding import MOST_BOXES
from amp_fx.errors import OptionError
from amp_fx.reports import COLORS, SHORT
from tests import needs
from tests.models.explained import CASES, gpt

if TYPE_CHECKING:
    from pathlib import Path

    from amp_fx.drawing.boxes import Box, Edge
    from amp_fx.drawing.draw import Drawing
    from amp_fx.explanation.explanation import Explanation

CACHED = {"weight_cache": "training"}
"""Casts of weights are cached in graphs with gradients too."""
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs the dot program")


@pytest.fixture(scope="module")
def explained() -> dict[str, Explanation]:
    return {
        name: amp_fx.explain(make(), options=CACHED)(*args) for name, (make, args) in CASES.items()
    }


@pytest.fixture(scope="module")
def deep() -> Explanation:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return amp_fx.explain(gpt(4), options=CACHED)(tokens, tokens)


EVERY_OP = 100
"""A depth that no model has."""


def boxes(drawing: Drawing) -> list[Box]:
    return [box for picture in drawing.pictures.values() for box in picture.boxes.values()]


def edges(drawing: Drawing) -> list[Edge]:
    return [edge for picture in drawing.pictures.values() for edge in picture.edges]


class Area(NamedTuple):
    """A part of a picture, in points."""

    name: str
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Area) -> bool:
        slack = 1.5  # the fonts of another machine are a little wider or narrower
        return (
            self.left + slack < other.right
            and other.left + slack < self.right
            and self.bottom + slack < other.top
            and other.bottom + slack < self.top
        )

    def is_in(self, other: Area) -> bool:
        return (
            other.left <= self.left
            and other.bottom <= self.bottom
            and self.right <= other.right
            and self.top <= other.top
        )


def layout_of(drawing: Drawing) -> Any:
    """Returns the layout that Graphviz computes."""
    return json.loads(drawing._render("json"))


def areas(layout: Any) -> list[Area]:
    """Returns the areas of all boxes and of all texts on edges."""
    found = []
    for node in layout["objects"]:
        if "pos" in node:
            x, y = map(float, node["pos"].split(","))
            w, h = 36 * float(node["width"]), 36 * float(node["height"])
            found.append(Area(node["name"], x - w, y - h, x + w, y + h))
    for edge in layout.get("edges", ()):
        for text in (drawn for drawn in edge.get("_ldraw_", ()) if drawn["op"] == "T"):
            (x, y), half = text["pt"], text["width"] / 2
            found.append(Area(text["text"], x - half, y - 2, x + half, y + 7))
    return found


def frames(layout: Any) -> list[Area]:
    """Returns the areas of the frames."""
    clusters = [o for o in layout["objects"] if o["name"].startswith("cluster")]
    return [Area(frame["name"], *map(float, frame["bb"].split(","))) for frame in clusters]


def arrows(layout: Any) -> list[Area]:
    """Pieces of the arrows, without their ends: points on the curves that Graphviz draws."""
    found = []
    for edge in layout.get("edges", ()):
        for points in (drawn["points"] for drawn in edge["_draw_"] if drawn["op"] == "b"):
            for start in range(0, len(points) - 1, 3):
                for t in (i / 24 for i in range(25)):
                    weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
                    pieces = list(zip(weights, points[start : start + 4], strict=True))
                    x, y = (sum(w * p[axis] for w, p in pieces) for axis in (0, 1))
                    found.append(Area("", x - 2, y - 2, x + 2, y + 2))
    return found


@needs_dot
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("depth", [None, EVERY_OP])
def test_no_text_lies_on_anything(
    name: str, depth: int | None, explained: dict[str, Explanation]
) -> None:
    layout = layout_of(amp_fx.draw(explained[name], depth=depth))
    found = areas(layout)
    assert len(found) > 10
    clashes = [(a.name, b.name) for i, a in enumerate(found) for b in found[:i] if a.overlaps(b)]
    assert not clashes
    crossed = [
        (area.name, frame.name)
        for frame in frames(layout)
        for area in found
        if area.overlaps(frame) and not area.is_in(frame)
    ]
    assert not crossed
    names = [area for area in found if area.name.startswith("title")]
    assert len(names) == len(frames(layout))
    assert not [name.name for name in names for arrow in arrows(layout) if name.overlaps(arrow)]


@needs_dot
@pytest.mark.parametrize("depth", [1, None, EVERY_OP])
def test_arrows_go_down(depth: int | None, explained: dict[str, Explanation]) -> None:
    """Covers modules that are called twice, and lists whose members alternate."""
    layout = layout_of(amp_fx.draw(explained["unet"], depth=depth))
    places = [o.get("pos", "0,0").partition(",")[2] for o in layout["objects"]]
    ends = [(edge["tail"], edge["head"]) for edge in layout["edges"]]
    assert all(float(places[tail]) > float(places[head]) for tail, head in ends)


def test_every_op_and_cast_is_drawn_once(explained: dict[str, Explanation]) -> None:
    for explanation in explained.values():
        drawn = boxes(amp_fx.draw(explanation, depth=EVERY_OP))
        totals = explanation.totals
        assert len({name for box in drawn for name in box.casts}) == totals.casts_left
        assert len({name for box in drawn for name in box.cached}) == totals.casts_cached
        ops = [name for box in drawn for name in box.ops]
        assert len(ops) == len(set(ops))
        shown = {
            node.name
            for node in explanation.nodes
            if node.kind in ("op", "opaque") and not (node.is_view and len(node.inputs) == 1)
        }
        assert {*ops} == shown


def test_casts_are_on_edges(explained: dict[str, Explanation]) -> None:
    """Draws casts from the input to the first op, and from the last op to the output."""
    drawing = amp_fx.draw(explained["mlp"], depth=EVERY_OP)
    [picture] = drawing.pictures.values()
    casts = [edge for edge in picture.edges if edge.cast]
    records = {cast.name: cast for cast in explained["mlp"].casts if cast.state == "inserted"}
    made = {name for box in boxes(drawing) for name in box.casts}
    assert made == {*records}
    for edge in casts:
        dtypes = {(SHORT[c.from_dtype], SHORT[c.to_dtype]) for c in records.values()}
        assert (edge.cast, edge.label.partition(" ")[0]) in dtypes


@needs.HOOK
def test_layers_fold_into_one_and_a_focus_unfolds_them(deep: Explanation) -> None:
    folded = amp_fx.draw(deep)
    assert "blocks.0-3  x 4" in folded.source
    qkv = [box for box in boxes(folded) if box.title == "qkv"]
    assert [(box.path, box.lines[-1]) for box in qkv] == [(("blocks.0-3",), "1 cast, 2 cached")]
    assert len(boxes(folded)) <= MOST_BOXES

    zoomed = boxes(amp_fx.draw(deep, focus="blocks.2"))
    inside = [box for box in zoomed if box.kind != "outside"]
    assert {box.path[0] for box in inside} == {"blocks.2"}
    assert {box.lines for box in zoomed if box.kind == "outside"} >= {
        ("in blocks.1",),
        ("in blocks.3",),
    }


def test_depth_is_the_number_of_levels(deep: Explanation) -> None:
    whole, outer = (boxes(amp_fx.draw(deep, depth=depth)) for depth in (0, 1))
    assert [box.title for box in whole if box.kind == "module"] == ["model"]
    assert "blocks.0-3" in [box.title for box in outer if box.kind == "module"]
    assert {box.path for box in outer} == {()}
    assert [levels(path) for path in ("layers.0.attn", "0.1", "11.norm", "a.b.2")] == [
        ("layers.0", "attn"),
        ("0", "1"),
        ("11", "norm"),
        ("a", "b.2"),
    ]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


def test_what_folds_inside_of_what_folds_has_its_class() -> None:
    layers = [nn.Sequential(*(Head() for _ in range(6)), nn.Tanh()) for _ in range(6)]
    drawn = amp_fx.draw(amp_fx.explain(nn.Sequential(*layers))(torch.randn(2, 8)))
    assert re.search(r"<B>0-5  x 6</B>.*Head", drawn.source)


def test_a_list_may_be_in_focus() -> None:
    model = nn.Sequential()
    model.add_module("mlp", nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    drawn = boxes(amp_fx.draw(amp_fx.explain(model)(torch.randn(2, 8)), focus="mlp"))
    assert [box.title for box in drawn if box.kind != "outside"] == ["mlp.0", "mlp.1"]


def test_layers_that_differ_do_not_fold() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
    source = amp_fx.draw(amp_fx.explain(model)(torch.randn(2, 8))).source
    # The first is alone in casting its input; the last has another shape.
    assert "1-2  x 2" in source
    assert "x 3" not in source
    assert "x 4" not in source


class AVeryLongNameOfAModuleThatNoBoxShouldBeAsWideAs(Head):
    pass


@needs_dot
def test_long_names_do_not_widen_boxes() -> None:
    long = nn.Sequential(AVeryLongNameOfAModuleThatNoBoxShouldBeAsWideAs(), nn.Linear(8, 8))
    short = nn.Sequential(Head(), nn.Linear(8, 8))
    explanations = [amp_fx.explain(model)(torch.randn(2, 8)) for model in (long, short)]
    for depth in (1, EVERY_OP):
        drawn = [amp_fx.draw(e, depth=depth) for e in explanations]
        [width, usual] = [float(layout_of(d)["bb"].split(",")[2]) for d in drawn]
        assert width < usual + 90
        assert "AVeryLongNameO…" in drawn[0].source


def test_a_mixed_module_has_stripes_in_the_shares_of_its_dtypes(
    explained: dict[str, Explanation],
) -> None:
    drawing = amp_fx.draw(explained["gpt"], depth=0)
    [box] = [box for box in boxes(drawing) if box.kind == "module"]
    counts = {dtype: box.dtypes.count(dtype) for dtype in ("bfloat16", "float32")}
    [(fill, style)] = re.findall(r'fillcolor="(#[^"]*;[^"]*)".*style=(\w+)', drawing.source)
    stripes = dict(stripe.split(";") for stripe in fill.split(":"))
    assert style == "striped"
    assert {color: float(share) for color, share in stripes.items()} == {
        COLORS[dtype]: pytest.approx(count / sum(counts.values()), abs=1e-3)
        for dtype, count in counts.items()
    }
    assert "striped" not in amp_fx.draw(explained["unet"], depth=1).source


def test_colours_edges_and_tooltips(explained: dict[str, Explanation]) -> None:
    [norm] = [b for b in boxes(amp_fx.draw(explained["mlp"])) if "layer_norm bf16" in b.lines]
    assert norm.dtypes == ("bfloat16",)
    source = amp_fx.draw(explained["attention"], depth=EVERY_OP).source
    assert "bf16 [2, 4, 10, 10]" in source
    assert "explained.py:" in source
    assert ".softmax(-1)" in source
    assert "cast, in every call" in source
    assert "cached: cast of a weight" in source


@needs_dot
def test_files_of_every_format(tmp_path: Path, explained: dict[str, Explanation]) -> None:
    starts = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG", "dot": b"digraph"}
    for ending, start in starts.items():
        path = tmp_path / f"graph.{ending}"
        amp_fx.draw(explained["mlp"], path)
        assert path.read_bytes().startswith(start)
    assert amp_fx.draw(explained["mlp"])._repr_mimebundle_()["image/svg+xml"].count("<svg") == 1


def width_of(png: Path) -> int:
    """Reads the width of a picture from its header."""
    return int.from_bytes(png.read_bytes()[16:20], "big")


@needs_dot
def test_pictures_of_dots_are_as_fine_as_asked(
    tmp_path: Path, explained: dict[str, Explanation]
) -> None:
    for dpi in (96, 192):
        amp_fx.draw(explained["mlp"], tmp_path / f"{dpi}.png", dpi=dpi)
    amp_fx.draw(explained["mlp"], tmp_path / "default.png")
    assert width_of(tmp_path / "192.png") == pytest.approx(2 * width_of(tmp_path / "96.png"), abs=2)
    assert width_of(tmp_path / "default.png") == width_of(tmp_path / "192.png")
    with pytest.raises(OptionError, match="dpi=0"):
        amp_fx.draw(explained["mlp"], tmp_path / "none.png", dpi=0)


class Reader(HTMLParser):
    """Collects tags, attributes and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


NAMES = (
    "{title} {svg}",
    'x" onmouseover=alert(1) y="',
    "</title><script>alert(2)</script>",
    "</svg><img src=x onerror=alert(3)>",
)


@needs_dot
def test_a_page_is_the_picture_and_the_table_and_names_stay_names(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(4, 4))
    explanation = amp_fx.explain(model)(torch.randn(2, 4))
    reader = Reader()
    reader.feed(amp_fx.draw(explanation).save(tmp_path / "page.html").read_text("utf-8"))
    assert reader.tags.count("svg") == 1
    assert {"script", "img", "link", "iframe"}.isdisjoint(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert not [value for name, value in reader.attributes if name == "href" and value]
    table = Reader()
    table.feed(explanation._repr_html_())
    assert table.text in reader.text
    assert all(reader.text.count(name) >= 2 for name in NAMES[:1])


def test_without_dot_an_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explained: dict[str, Explanation]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for ending in ("html", "png"):
        with pytest.raises(OptionError, match="apt-get install graphviz"):
            amp_fx.draw(explained["mlp"], tmp_path / f"graph.{ending}")
    assert amp_fx.draw(explained["mlp"], tmp_path / "graph.dot")
    bundle = amp_fx.draw(explained["mlp"])._repr_mimebundle_()
    assert "apt-get install graphviz" in bundle["text/plain"]


def test_bad_input(tmp_path: Path, explained: dict[str, Explanation]) -> None:
    explanation = explained["gpt"]
    formats = r"\.svg, \.pdf, \.png, \.dot, \.html"
    with pytest.raises(OptionError, match=rf"graph\.jpg.* must end in one of {formats}"):
        amp_fx.draw(explanation, tmp_path / "graph.jpg")
    with pytest.raises(OptionError, match="in an existing folder"):
        amp_fx.draw(explanation, tmp_path / "nowhere" / "graph.dot")
    with pytest.raises(OptionError, match=r"did you mean 'blocks\.0\.attention_norm'"):
        amp_fx.draw(explanation, focus="blocks.0.atention_norm")
    with pytest.raises(OptionError, match="focus='zzz' is not a module"):
        amp_fx.draw(explanation, focus="zzz")
    with pytest.raises(OptionError, match="depth=-1 is neither"):
        amp_fx.draw(explanation, depth=-1)
    with pytest.raises(OptionError, match=r"amp_fx\.explain\(model\)"):
        amp_fx.draw(nn.Linear(4, 4))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explained: dict[str, Explanation]
) -> None:
    """Raises an error of the system itself, because root may write to any folder."""

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    with pytest.raises(OptionError, match=r"cannot write .*graph\.dot.*Permission denied"):
        amp_fx.draw(explained["mlp"], tmp_path / "graph.dot")

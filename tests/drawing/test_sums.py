"""The numbers in the boxes of closed modules are those of the explanation, at every level."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx

pytest.importorskip("transformers")

from tests.audit.architectures import build

if TYPE_CHECKING:
    from amp_fx.drawing.boxes import Box
    from amp_fx.drawing.draw import Drawing
    from amp_fx.explanation.explanation import Explanation

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = (
    *("gpt2", "llama", "bert", "opt", "gpt_neox", "distilbert", "resnet", "vit", "convnext"),
    "encoder",
)
FAST = ("convnext",)
"""Those that `make test` explains; `make slow` explains the others."""


@pytest.fixture(
    scope="module",
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def explained(request: pytest.FixtureRequest) -> Explanation:
    if request.param == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        inputs = {"src": torch.randn(2, 4, 16)}
    else:
        model, inputs = build(request.param)
        model.eval()
    options = {"weight_cache": "training"}
    return amp_fx.explain(model, device_type="cpu", dtype=torch.bfloat16, options=options)(**inputs)


def closed(drawing: Drawing) -> list[Box]:
    found = [box for picture in drawing.pictures.values() for box in picture.boxes.values()]
    return [box for box in found if box.kind == "module" and box.title != "indices"]


def numbers(box: Box) -> tuple[int, int, int]:
    """Ops, casts and kept casts that a box names."""
    said = "\n".join(box.lines)

    def first(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return first(r"(\d+) ops") or 1, first(r"(\d+) casts?\b"), first(r"(\d+) cached")


def unfolded(path: str) -> tuple[re.Pattern[str], int]:
    """Returns a pattern of the modules that a folded path represents, and their number."""
    parts, times = [], 1
    for part in path.split("."):
        match = re.fullmatch(r"(\d+)-(\d+)", part)
        inside = range(int(match[1]), int(match[2]) + 1) if match else ()
        times *= len(inside) or 1
        parts.append("(" + "|".join(map(str, inside)) + ")" if inside else re.escape(part))
    return re.compile(r"\.".join(parts) + r"(\..*)?"), times


def wanted(explanation: Explanation, pattern: re.Pattern[str]) -> list[int]:
    """Ops, casts and kept casts of the modules that match, by the explanation's records."""
    sums = [0, 0, 0]
    for record in explanation.forward:
        modules = {node.name: node.module for node in record.nodes}
        kinds = {node.name: node.kind for node in record.nodes}
        sums[0] += sum(
            node.kind in ("op", "opaque")
            and bool(pattern.fullmatch(node.module))
            and not (node.is_view and len(node.inputs) == 1)
            for node in record.nodes
        )
        for cast in record.casts:
            users = [name for name in cast.consumers if kinds.get(name) != "output"]
            if (
                cast.state in ("inserted", "cached")
                and users
                and pattern.fullmatch(modules[users[0]])
            ):
                sums[1 if cast.state == "inserted" else 2] += 1
    return sums


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_numbers_of_every_closed_box_are_those_of_the_explanation(
    explained: Explanation, depth: int
) -> None:
    drawings = [amp_fx.draw(explained)]
    for _ in range(depth):
        paths = {".".join((*b.path, b.title)) for d in drawings for b in closed(d)}
        paths = {re.sub(r"(\d+)-\d+", r"\1", path) for path in paths}
        drawings = [amp_fx.draw(explained, focus=path) for path in sorted(paths)]
    said: dict[str, list[int]] = {}
    for drawing in drawings:
        here: dict[str, list[int]] = {}
        for box in closed(drawing):  # one that is called twice has two boxes
            path = ".".join((*box.path, box.title))
            here[path] = [a + b for a, b in zip(here.get(path, [0] * 3), numbers(box), strict=True)]
        said |= here
    for path, found in said.items():
        pattern, times = unfolded(path)
        total = wanted(explained, pattern)
        assert [count * times for count in found] == total, path
    assert said or depth

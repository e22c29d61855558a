"""Which modules of a picture are open: those of one class alike."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.drawing.folding import choose_closed


class BasicBlock(nn.Module):
    """As in torchvision, with names as there."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outer), nn.ReLU()
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample: nn.Module | None = None
        if stride != 1:
            shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: torch.Tensor = self.relu(out + (self.downsample(x) if self.downsample else x))
        return result


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(BasicBlock(a, b, 1 + (a != b)), BasicBlock(b, b, 1))
            for a, b in itertools.pairwise(sizes)
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        result: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return result


@pytest.mark.slow
def test_the_blocks_of_a_resnet_are_closed_in_every_stage() -> None:
    with torch.no_grad():
        drawing = amp_fx.draw(amp_fx.explain(ResNet().eval())(torch.randn(2, 3, 32, 32)))
    [graph] = drawing.boxes.values()
    drawn = [box for _, box in graph.nodes(data="box")]
    blocks = [f"{b.module}.{b.title}" for b in drawn if "BasicBlock" in b.lines]
    # The first stage has no shortcut of its own, so both of its blocks are one.
    assert blocks == ["layer1.0-1", *(f"layer{i}.{j}" for i in (2, 3, 4) for j in (0, 1))]
    assert not [box for box in drawn if re.match(r"layer\d\.", box.module)]
    assert "<B>layer1.0-1  x2</B>" in drawing.source


def numbered(stages: dict[str, list[str]], inner: list[str]) -> list[str]:
    return [
        f"{s}.{block}.{name}" for s, blocks in stages.items() for block in blocks for name in inner
    ]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({"a": ["0-3"]}, []),  # alone in its place: open
        ({"a": ["0-1"], "b": ["0", "1"]}, ["a.0-1", "b.0", "b.1"]),
        ({"a": ["0-1"], "b": ["0", "1-4"]}, ["b.0"]),  # one is open in each place
    ],
)
def test_folded_blocks_are_open_in_all_lists_or_in_none(
    stages: dict[str, list[str]], expected: list[str]
) -> None:
    inner = [f"op{i}" for i in range(4)]
    modules = numbered(stages, inner)
    types = {module.rpartition(".")[0]: "Block" for module in modules}
    closed = choose_closed(modules, types, most=11)
    assert [path for path in closed if path in types] == expected


def test_a_class_inside_of_itself_may_be_closed_there() -> None:
    modules = ["net.a.inner.x", "net.a.inner.y", "net.b.x", "net.b.y", "net.b.z"]
    types = {"net": "Unit", "net.a": "Part", "net.a.inner": "Unit", "net.b": "Part"}
    closed = choose_closed(modules, types, most=4)
    assert closed == ["net.a.inner", "net.b.x", "net.b.y", "net.b.z"]


def test_containers_say_nothing_about_what_is_inside() -> None:
    modules = [f"a.0-3.{i}" for i in range(4)] + [f"b.{i}.{j}" for i in range(2) for j in range(4)]
    types = dict.fromkeys(("a.0-3", "b.0", "b.1"), "Sequential")
    assert choose_closed(modules, types, most=11)[:2] == ["b.0", "b.1"]

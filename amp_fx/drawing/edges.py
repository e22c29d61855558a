"""The arrows of a picture, and where it says what goes along them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from amp_fx.drawing.boxes import BoxGraph


@dataclasses.dataclass(frozen=True)
class Stream:
    """What a box gives, and the boxes that take it.

    Attributes:
        source: Name of the box that gives.
        targets: Names of those that take.
        labels: Dtype and shape of each tensor that goes along.
        is_ghost: Whether it leads to or from a cast that was taken out.
    """

    source: str
    targets: tuple[str, ...]
    labels: tuple[str, ...]
    is_ghost: bool


def streams_of(graph: BoxGraph) -> list[Stream]:
    """The streams of a graph of boxes: arrows out of a box that say the same are one.

    So the label of a tensor that a layer and the residual connection around it take is there
    once, in front of both.
    """
    targets: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
    for source, target, data in graph.edges(data=True):
        labels = tuple(label for label in data["labels"] if label)
        targets.setdefault((source, labels, data["is_ghost"]), []).append(target)
    return [Stream(a, tuple(found), labels, g) for (a, labels, g), found in targets.items()]


def split(streams: Iterable[Stream], names: Container[str]) -> tuple[list[Stream], list[Stream]]:
    """The streams among some boxes, and what is left.

    What leaves those boxes loses its label if it is there among them already.
    """
    inside, outside = [], []
    for stream in streams:
        near = tuple(target for target in stream.targets if target in names)
        if stream.source not in names or not near:
            outside.append(stream)
            continue
        inside.append(dataclasses.replace(stream, targets=near))
        if far := tuple(target for target in stream.targets if target not in names):
            outside.append(dataclasses.replace(stream, targets=far, labels=()))
    return inside, outside

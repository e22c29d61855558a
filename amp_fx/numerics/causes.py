"""Where the error of an op comes from: up the graph of what made its inputs."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.numerics.records import OpRecord

HOPS = 4
"""How far up the cause of an overflow or a cancellation is looked for."""
FEW_FLIPS = 0.05
"""The share of discrete elements that may differ because values were near to each other."""


class OpGraph:
    """The ops of a report, and which of them made the inputs of which."""

    def __init__(self, nodes: Sequence[OpRecord]) -> None:
        self.nodes = nodes
        self._by_index = {node.index: node for node in nodes}

    def upstream(self, node: OpRecord, *, is_inside: bool = False) -> list[OpRecord]:
        """The ops that made its inputs and those of these, the nearest first, ``HOPS`` far.

        With ``is_inside`` it goes as far as the ops of its module do.
        """
        found: dict[int, OpRecord] = {}
        level = [node]
        for _ in range(len(self.nodes) if is_inside else HOPS):
            above = {n.index: n for below in level for n in reversed(self.inputs(below))}
            level = [n for index, n in above.items() if index not in found]
            if is_inside:
                level = [n for n in level if n.module == node.module]
            if not level:
                break
            found |= {n.index: n for n in level}
        return list(found.values())

    def maker_of_error(self, node: OpRecord) -> OpRecord:
        """The op that made most of an error: up the largest, to where half of it is the op's own.

        Indices and masks pass errors on, though they have none in numbers.
        """
        seen = {node.index}
        while node.local < node.accumulated / 2 or not node.is_float:
            above = [n for n in self.inputs(node) if n.index not in seen]
            above = [n for n in above if n.accumulated or not n.is_float]
            if not above:
                break
            node = max(above, key=lambda n: n.accumulated)
            seen.add(node.index)
        return node

    @functools.cached_property
    def chosen(self) -> frozenset[int]:
        """The ops of the forward that take elements of which a few were chosen otherwise.

        Where two values are near to each other, it is chance which of them is the larger one: one
        token goes to another expert, and sorted by experts all others stand elsewhere. The error
        of what is taken is then as large as the numbers, and no harm. What counts is how many
        elements differ in the first discrete result.
        """
        shares: dict[int, float] = {}
        found = set()
        for node in self._forward():
            above = max((shares.get(n.index, 0.0) for n in self.inputs(node)), default=0.0)
            if 0 < above < FEW_FLIPS:
                found.add(node.index)
            if node.flips:
                numel = max(1, math.prod(node.shape) * node.num_batches)
                shares[node.index] = above or node.flips / numel
        return frozenset(found)

    @functools.cached_property
    def entered(self) -> dict[int, float]:
        """The errors with which what ops of the forward work on came into their modules."""
        found: dict[int, float] = {}
        for node in self._forward():
            errors = [node.accumulated if node.index in self.chosen else 0.0]
            for index in node.inputs:
                above = self._by_index.get(index)
                if above is None:  # it was not measured
                    errors.append(node.accumulated_in)
                elif above.module == node.module:
                    errors.append(found.get(index, above.accumulated))
                else:
                    errors.append(above.accumulated)
            found[node.index] = max(errors)
        return found

    def _forward(self) -> list[OpRecord]:
        return [node for node in self.nodes if node.stage == "forward"]

    def inputs(self, node: OpRecord) -> list[OpRecord]:
        """The ops that made its inputs, as far as they were measured."""
        return [self._by_index[i] for i in node.inputs if i in self._by_index]


def weight_of(nodes: Sequence[OpRecord]) -> float:
    """What ops do to the loss together: with the signs of their errors, or with signs by chance."""
    signed = abs(sum(n.effect or 0.0 for n in nodes))
    return max(signed, math.hypot(*(n.effect_rms for n in nodes)))

"""Sums of what a program moves: the kernels of its graphs, and the refresh of cached values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.traffic.kernels import CAST, EXTERN, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.traffic.counting import Graph

TENSORS, BLOCKS, CHUNK = 64, 320, 65536
"""Of one launch of a kernel for two lists: ``ATen/native/cuda/MultiTensorApply.cuh``."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums of one call, with its backward if there is one.

    Attributes:
        num_bytes: Bytes that all kernels read and write.
        num_launches: Number of launches of kernels that inductor generated, and of a refresh.
        num_extern: Number of launches of library kernels.
        num_casts: Number of ``num_launches`` that only cast, including those of a refresh.
        num_layouts: Number of ``num_launches`` that only copy into another layout.
        num_refreshes: Number of ``num_launches`` of a refresh.
        saved_bytes: Bytes that the forward saves for the backward, without inputs of the program.
        wire_bytes: Bytes that one rank passes to collectives.
    """

    num_bytes: int
    num_launches: int
    num_extern: int
    num_casts: int
    num_layouts: int
    num_refreshes: int
    saved_bytes: int
    wire_bytes: int


def totals(
    graphs: Iterable[Graph], refreshed: Iterable[tuple[int, int, int, bool]], device: str
) -> Totals:
    """Adds up what one call moves.

    Args:
        graphs: Its graphs.
        refreshed: The casts of weights that were made before it.
        device: ``"cpu"`` or ``"cuda"``.
    """
    graphs, refreshed = list(graphs), list(refreshed)
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    kinds = [kernel.kind for kernel in kernels]
    num_refreshes = refresh_launches(refreshed, device)
    made = sum(count * (wide + low) for count, wide, low, _ in refreshed)
    return Totals(
        num_bytes=sum(kernel.num_bytes for kernel in kernels) + made,
        num_launches=len(kinds) - kinds.count(EXTERN) + num_refreshes,
        num_extern=kinds.count(EXTERN),
        num_casts=kinds.count(CAST) + num_refreshes,
        num_layouts=kinds.count(LAYOUT),
        num_refreshes=num_refreshes,
        saved_bytes=sum(graph.saved_bytes for graph in graphs),
        wire_bytes=sum(graph.wire_bytes for graph in graphs),
    )


def refresh_launches(refreshed: Iterable[tuple[int, int, int, bool]], device: str) -> int:
    """Returns the number of launches of a refresh: ``torch._foreach_copy_`` and single copies.

    Values with another layout than their weight, and values that need more than one launch, are
    copied separately. On the CPU, all values are.
    """
    casts = list(refreshed)
    alike = [count for count, *_, is_alike in casts if is_alike and count < BLOCKS * CHUNK]
    if device == "cpu":
        return len(casts)
    return len(casts) - len(alike) + _launches_of_list(alike)


def _launches_of_list(counts: list[int]) -> int:
    """As ``multi_tensor_apply`` fills its launches: by tensors and by blocks of chunks."""
    launches = tensors = blocks = 0
    for count in counts:
        tensors += 1
        chunks = -(-count // CHUNK)
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if blocks == BLOCKS or (tensors == TENSORS and is_last):
                launches += 1
                blocks, tensors = 0, 0 if is_last else 1
    return launches + bool(blocks)

"""What one program moves in all: the kernels of its graphs, and the refresh of kept casts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tests.traffic.kernels import CAST, EXTERN, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TENSORS, BLOCKS, CHUNK = 64, 320, 65536
"""Of one launch of a kernel for two lists: ``ATen/native/cuda/MultiTensorApply.cuh``."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Of one call, with its backward if there is one.

    Attributes:
        num_bytes: What all kernels read and write.
        num_launches: How many kernels that inductor generated there are, and launches of a refresh.
        num_extern: How many kernels of libraries there are.
        num_casts: How many of the former only cast, those of a refresh among them.
        num_layouts: How many of the former only copy into another layout.
        num_refreshes: How many of the former are those of a refresh.
        saved_bytes: What the forward saves for the backward, but for inputs of the program.
        wire_bytes: Bytes that one rank hands to collectives.
        extern_bytes: What kernels of libraries read and write.
    """

    num_bytes: int
    num_launches: int
    num_extern: int
    num_casts: int
    num_layouts: int
    num_refreshes: int
    saved_bytes: int
    wire_bytes: int = 0
    extern_bytes: int = 0


def totals(
    graphs: Iterable[Mapping[str, Any]],
    refreshed: Iterable[tuple[int, int, int, bool]],
    device: str,
) -> Totals:
    """Adds up what ``tests.traffic.worker.count`` gave.

    Args:
        graphs: Of one call.
        refreshed: The casts of weights that were made before it.
        device: ``"cpu"`` or ``"cuda"``.
    """
    graphs, refreshed = list(graphs), list(refreshed)
    kernels = [kernel for graph in graphs for kernel in graph["kernels"]]
    kinds = [kernel["kind"] for kernel in kernels]
    num_refreshes = refresh_launches(refreshed, device)
    made = sum(count * (wide + low) for count, wide, low, _ in refreshed)
    return Totals(
        num_bytes=sum(kernel["num_bytes"] for kernel in kernels) + made,
        num_launches=len(kinds) - kinds.count(EXTERN) + num_refreshes,
        num_extern=kinds.count(EXTERN),
        num_casts=kinds.count(CAST) + num_refreshes,
        num_layouts=kinds.count(LAYOUT),
        num_refreshes=num_refreshes,
        saved_bytes=sum(graph["saved_bytes"] for graph in graphs),
        wire_bytes=sum(graph["wire_bytes"] for graph in graphs),
        extern_bytes=sum(k["num_bytes"] for k in kernels if k["kind"] == EXTERN),
    )


def refresh_launches(refreshed: Iterable[tuple[int, int, int, bool]], device: str) -> int:
    """How many launches a refresh takes: of ``torch._foreach_copy_``, and of single copies.

    What lies otherwise than its weight, or would take more than a launch, is copied by itself; on
    the CPU everything is.
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

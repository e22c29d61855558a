"""Emulates CUDA graphs that a user captures, and streams: replays run the same kernels.

CUDA runs nothing during a capture. Here kernels run, and memory that existed before is restored at
the end, except after writes of Triton's kernels. As in CUDA, nothing is notified of the writes of a
replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.cuda import memory

if TYPE_CHECKING:
    from collections.abc import Callable


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what torch's takes."""
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Notes kernels from now on."""
        memory.CAPTURES.append(self)

    def capture_end(self) -> None:
        """Notes no more, and puts back what was written."""
        memory.CAPTURES.remove(self)
        for written, before in reversed(self._before):
            memory.on_host(written).copy_(before)

    def save(self, written: list[Any]) -> None:
        """Keeps what is about to be written."""
        for leaf in tree_flatten(written)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._before.append((leaf.detach(), memory.on_host(leaf).clone()))

    def note(self, run: Callable[..., Any], args: Any, kwargs: Any, found: Any) -> None:
        """Notes a kernel, the places of its arguments, and those of its results."""
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, found))
        self._calls.append((run, given[0], given[1], tree_flatten(given[2])[0]))

    def replay(self) -> None:
        """Runs the kernels again; results lie where they lay."""
        with memory.replaying():
            for run, args, kwargs, places in self._calls:
                results = tree_flatten(run(*args, **kwargs))[0]
                for place, result in zip(places, results, strict=True):
                    if isinstance(place, torch.Tensor) and place.device.type == "cuda":
                        memory.on_host(place).copy_(memory.on_host(result))

    def pool(self) -> tuple[int, int]:
        """All memory is one pool."""
        return 0, 0

    def reset(self) -> None:
        """Forgets the kernels."""
        self._calls.clear()


class Capture:
    """In the place of ``torch.cuda.graph``."""

    def __init__(self, cuda_graph: Graph, *_: Any, **__: Any) -> None:
        """Takes what torch's takes."""
        self._graph = cuda_graph

    def __enter__(self) -> None:
        """Begins the capture."""
        self._graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self._graph.capture_end()


class Stream:
    """In the place of ``torch.cuda.Stream``: another name for where kernels run, at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what torch's takes."""
        self._stream = torch.Stream(device="cuda")

    def __enter__(self) -> None:
        """Makes it the current stream."""
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Makes another one the current stream again."""
        self._stream.__exit__(*error)

    def wait_stream(self, _: Any) -> None:
        """Waits for nothing."""

    def wait_event(self, _: Any) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""


def install() -> None:
    """Puts these in the place of torch's, for the rest of the process."""
    from torch.cuda import graphs

    answers: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: bool(memory.CAPTURES),
    }
    for place in (torch.cuda, graphs):
        for name, answer in answers.items():
            setattr(place, name, answer)
    streams: Any = torch.cuda
    streams.Stream = Stream
    streams.stream = lambda stream: stream

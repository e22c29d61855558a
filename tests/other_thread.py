"""Another thread that compiles."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx import Policy


@contextlib.contextmanager
def compiling_elsewhere(policy: Policy | None = None) -> Iterator[None]:
    """Compiles in another thread, in a region, for as long as the block runs."""
    is_compiling, is_done = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        is_compiling.set()
        assert is_done.wait(60)
        return gm.forward

    call = torch.compile(lambda x: x + 1, backend=backend)

    def run() -> None:
        with amp_fx.autocast("cpu", policy=policy):
            call(torch.ones(2))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_compiling.wait(60)
        assert torch.compiler.is_compiling(), "the flag is for all threads"
        yield
    finally:
        is_done.set()
        thread.join()

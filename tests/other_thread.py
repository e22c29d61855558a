"""Another thread that compiles."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Has Dynamo compile in another thread for as long as the block runs."""
    is_compiling, is_done = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        is_compiling.set()
        assert is_done.wait(60)
        return gm.forward

    call = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=call, args=(torch.ones(2),))
    thread.start()
    try:
        assert is_compiling.wait(60)
        assert torch.compiler.is_compiling(), "the flag is for all threads"
        yield
    finally:
        is_done.set()
        thread.join()

"""Runs the code that inductor generates for CUDA: wrappers as they are, kernels interpreted.

Inductor itself hands kernels to Triton's interpreter if ``TRITON_INTERPRET=1``
(``AsyncCompile.triton``, ``CachingAutotuner.run``). Library kernels go through the dispatcher to
those of ``tests/cuda/memory.py``. Kernels are neither compiled nor timed: nothing is tuned, and
products are not padded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@functools.cache
def start() -> None:
    """Enables generated code to run in this process, after ``device.start``."""
    from tests.cuda import interpreter

    interpreter.repair()
    _allocate_on_host()
    _leave_the_driver_alone()
    _configure()


def _allocate_on_host() -> None:
    """Gives wrappers memory; they call a function of torch's that passes by the dispatcher.

    Relies on ``torch._C._dynamo.guards._empty_strided_cuda``, which wrappers look up by name.
    """

    def empty_strided(
        size: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty_strided(size, strides, dtype=dtype, device="cuda")

    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = empty_strided


def _leave_the_driver_alone() -> None:
    """Kernels' modules would look for CUDA's library when they are imported.

    Relies on ``torch._inductor.runtime.triton_helpers.set_driver_to_gpu``.
    """
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None


def _configure() -> None:
    """No other processes, no caches, and none of what is decided by timing kernels."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    config.compile_threads = 1
    config.shape_padding = False
    config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False

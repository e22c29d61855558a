"""A CUDA device in the host's memory: starts it, for the rest of the process.

It also runs the code that inductor generates for CUDA: wrappers as they are, kernels interpreted.
Inductor itself hands kernels to Triton's interpreter if ``TRITON_INTERPRET=1``
(``AsyncCompile.triton``, ``CachingAutotuner.run``). Library kernels go through the dispatcher to
those of ``tests/cuda/memory.py``. Kernels are neither compiled nor timed: nothing is tuned, and
products are not padded.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from tests.cuda import interpreter, memory, user_graphs
from tests.cuda.cuda_only import attention
from tests.traffic import pretend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@functools.cache
def start() -> None:
    """Makes torch find a GPU whose kernels the host computes.

    ``pretend_cuda`` answers the queries of torch, Dynamo and inductor about the GPU before they
    generate code for it. This function installs what that code needs to run.
    """
    pretend.pretend_cuda()
    memory.install()
    interpreter.repair()
    user_graphs.install()
    _seed_the_device()
    _attend()
    torch.backends.cudnn.is_acceptable = _not_acceptable
    places: Any = torch.cuda
    places.Event = Event
    _allocate_on_host()
    _leave_the_driver_alone()
    _configure()


class Event:
    """Replacement for ``torch.cuda.Event`` that has always happened: kernels run immediately."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepts the arguments of ``torch.cuda.Event``."""

    def record(self, *_: Any) -> None:
        """Does nothing."""

    def wait(self, *_: Any) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Returns True if the event has happened; raises as the events of ``guard.cpp`` do."""
        return torch.accelerator.current_stream("cuda").record_event().query()


@contextlib.contextmanager
def capture_elsewhere() -> Iterator[None]:
    """Pretends that another thread captures a CUDA graph in the mode ``"global"``.

    Calls that would end the capture raise an error.
    """
    pretend.guard().amp_fx_capture_elsewhere(True)
    try:
        yield
    finally:
        pretend.guard().amp_fx_capture_elsewhere(False)


def _not_acceptable(_: torch.Tensor) -> bool:
    """Returns False, so that recurrent networks run cell by cell, as they do without cuDNN."""
    return False


def _seed_the_device() -> None:
    """Connects the seeds and states of ``torch.cuda`` with ``memory.RANDOM``."""
    random = memory.RANDOM
    answers: dict[str, Any] = {
        "manual_seed": random.seed,
        "manual_seed_all": random.seed,
        "get_rng_state": random.get,
        "set_rng_state": random.set,
    }
    for place in (torch.cuda, torch.cuda.random):
        for name, answer in answers.items():
            setattr(place, name, answer)


def _attend() -> None:
    """Chooses the kernel of attention, for which CUDA's own function would ask the driver."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    name = "scaled_dot_product_attention"
    library.impl(name, attention, "AutogradCUDA", allow_override=True)
    library.impl(name, attention, "CUDA", allow_override=True)
    memory.keep(library)


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

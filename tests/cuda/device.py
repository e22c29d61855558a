"""A CUDA device in the host's memory: starts it, for the rest of the process."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from tests.cuda import memory, user_graphs
from tests.cuda.cuda_only import attention
from tests.traffic import pretend

if TYPE_CHECKING:
    from collections.abc import Iterator


@functools.cache
def start() -> None:
    """Makes torch find a GPU whose kernels the host computes.

    ``pretend_cuda`` answers the queries of torch, Dynamo and inductor about the GPU before they
    generate code for it. This function installs what that code needs to run.
    """
    pretend.pretend_cuda()
    memory.install()
    user_graphs.install()
    _seed_the_device()
    _attend()
    torch.backends.cudnn.is_acceptable = _not_acceptable
    places: Any = torch.cuda
    places.Event = Event


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

"""Saves and restores the states from which torch, NumPy and Python draw random numbers."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def random_state(device: torch.device) -> Callable[[], None]:
    """Saves the random state of a device; returns a function that restores it."""
    if device.type == "cpu":
        return functools.partial(torch.set_rng_state, torch.get_rng_state())
    module = getattr(torch, device.type)
    return functools.partial(module.set_rng_state, module.get_rng_state(device), device)


def random_states(*accelerators: str) -> Callable[[], None]:
    """Saves the random states of the CPU, NumPy and Python; returns a function that restores them.

    Args:
        accelerators: Device types whose states are saved as well, where they are available. This
            initializes their context.
    """
    devices = [torch.device("cpu")]
    for kind in accelerators:
        module = getattr(torch, kind)
        count = module.device_count() if module.is_available() else 0
        devices += [torch.device(kind, index) for index in range(count)]
    states = [random_state(device) for device in devices]
    states.append(functools.partial(random.setstate, random.getstate()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for each in states:
            each()

    return restore


def host_random_state() -> bytes:
    """Returns the state of Python's and NumPy's global generators, which each draw changes."""
    numpy: Any = sys.modules.get("numpy")
    return pickle.dumps((random.getstate(), numpy and numpy.random.get_state()))


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Context that leaves the random states of the CPU, NumPy and Python as they were."""
    restore = random_states()
    try:
        yield
    finally:
        restore()

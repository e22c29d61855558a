"""The package of a new accelerator, ``my_device``: what a vendor writes, without autocast.

``import my_device`` builds ``device.cpp``, which registers kernels and memory, and gives torch the
module ``torch.my_device``. Functions that torch calls on that module are those of this file.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("device.cpp")

_cpp: Any = cpp_extension.load("my_device_cpp", [str(SOURCE)], extra_cflags=["-O1"])  # type: ignore[no-untyped-call]
_initialized = True  # checkpoints save random states of devices that are


def is_available() -> bool:
    """Returns True if there is a device."""
    return True


def is_initialized() -> bool:
    """Returns True if torch can use the device."""
    return True


def device_count() -> int:
    """Returns the number of devices."""
    return 1


def current_device() -> int:
    """Returns the index of the current device."""
    return 0


@contextlib.contextmanager
def device(_: object) -> Iterator[None]:
    """Context in which a device is the current one, such as for checkpoints."""
    yield


def synchronize(_: object = None) -> None:
    """Waits for the device, whose kernels are done when they return."""


def get_rng_state(_: object = None) -> torch.Tensor:
    """Returns the state of random numbers, which is the CPU's (``device.cpp``)."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, _: object = None) -> None:
    """Sets the state of random numbers."""
    torch.set_rng_state(state)


def manual_seed_all(_: int) -> None:
    """Seeds random numbers, which ``torch.manual_seed`` has done on the CPU."""


def _is_in_bad_fork() -> bool:
    return False


def limit_memory(num_bytes: int) -> int:
    """Limits the memory of the device; returns the number of bytes in use."""
    return int(_cpp.limit_memory(num_bytes))


# torch's recurrent cells call two fused kernels on accelerators. The CPU has none to fall back to.
# (To train them, add their backward: _thnn_fused_lstm_cell_backward_impl and
# _thnn_fused_gru_cell_backward.)


@torch.library.impl("aten::_thnn_fused_lstm_cell", "PrivateUse1")
def _lstm_cell(
    inputs: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = _biased(inputs, input_bias) + _biased(hidden, hidden_bias)
    keep, forget, new, out = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + keep.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell, gates


@torch.library.impl("aten::_thnn_fused_gru_cell", "PrivateUse1")
def _gru_cell(
    inputs: torch.Tensor,
    hidden: torch.Tensor,
    state: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    reset, update, new = _biased(inputs, input_bias).chunk(3, 1)
    old_reset, old_update, old = _biased(hidden, hidden_bias).chunk(3, 1)
    candidate = (new + (reset + old_reset).sigmoid() * old).tanh()
    share = (update + old_update).sigmoid()
    return candidate + share * (state - candidate), inputs


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


torch.utils.rename_privateuse1_backend("my_device")  # type: ignore[no-untyped-call]
torch._register_device_module("my_device", sys.modules[__name__])

"""How a write to a weight is noticed: which signal tells of which kind of write, where.

A kept copy is fresh as long as no signal tells otherwise. No single one sees every write:

storage
    Somebody asked the weight's storage for a pointer to write through
    (``csrc/watch.cpp``). The kernels of plain in-place
    ops do, on ``.data`` and under ``inference_mode`` too, and those of inductor, collectives,
    NumPy, DLPack and ``data_ptr()``. Kernels that take lists do not on accelerators:
    their pointers are ``const_data_ptr`` (``MultiTensorApply.cuh``, the fused optimizers).
version
    ``Tensor._version`` rose. It is the weight's own: writes through ``.data`` leave it alone.
list op
    A kernel of ours in front of each op that writes a list of tensors (``_foreach_*_``,
    ``_fused_*_``), whoever calls it on whatever tensors.
step
    An optimizer's ``step`` ended (``register_optimizer_step_post_hook``): any of its weights
    may have been written, by kernels of its own too.
sample
    An element is not what it was when a value was made: ``options={"verify": ...}``. On
    accelerators the answer is read at a later call (``amp_fx.weights.sample``).
place
    The weight lies elsewhere: another storage, offset, shape or layout.

``CAUGHT_BY`` says which of them catch what. A device that is not in it keeps no casts: MPS
kernels ask no storage at all, and of other backends nothing is known.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_fx.weights.engine import engine
from amp_fx.weights.spread import is_managed, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

CAUGHT_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "in-place op on the weight": {
        "cpu": ("storage", "version"),
        "cuda": ("storage", "version"),
        "xpu": ("storage", "version"),
    },
    "in-place op on .data": {"cpu": ("storage",), "cuda": ("storage",), "xpu": ("storage",)},
    "foreach op on weights": {
        "cpu": ("storage", "version", "list op"),
        "cuda": ("version", "list op"),
        "xpu": ("list op",),
    },
    "foreach op on .data": {
        "cpu": ("storage", "list op"),
        "cuda": ("list op",),
        "xpu": ("list op",),
    },
    "fused op": {"cpu": ("storage", "list op"), "cuda": ("list op",), "xpu": ("list op",)},
    "optimizer step": {"cpu": ("storage", "step"), "cuda": ("step",), "xpu": ("step",)},
    "compiled code (inductor, Triton launched through it)": {
        "cpu": ("storage",),
        "cuda": ("storage",),
        "xpu": ("storage",),
    },
    "another tensor assigned to .data, or as the parameter": {
        "cpu": ("place",),
        "cuda": ("place",),
        "xpu": ("place",),
    },
    "pointer, NumPy array or DLPack alias taken since the latest call": {
        "cpu": ("storage",),
        "cuda": ("storage",),
        "xpu": ("storage",),
    },
    "pointer, NumPy array or DLPack alias taken before the latest call": {
        "cpu": ("sample",),
        "cuda": ("sample",),
        "xpu": ("sample",),
    },
}
"""By kind of write and device type, the signals that tell of it; one would do."""

DEVICES = ("cpu", "cuda", "xpu")


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(after_step)


def install() -> None:
    """Notices list ops, collectives and optimizer steps from here on, for the process."""
    with _install_lock:
        _watch_steps()
        engine().watch_list_ops()


_install_lock = threading.Lock()


def after_step(optimizer: Any, *_: Any) -> None:
    """Takes all weights of an optimizer for written."""
    if torch.compiler.is_dynamo_compiling():
        return  # a compiled step writes through pointers that its kernels ask for
    weights = parts_of([p for group in optimizer.param_groups for p in group["params"]])
    engine().mark(weights)
    if is_capturing({weight.device for weight in weights}):
        for weight in weights:
            engine().distrust(weight)  # replays write unseen


def is_capturing(devices: Iterable[torch.device]) -> bool:
    """Whether what is done on CUDA devices now is recorded in a CUDA graph, not done.

    Builds without CUDA raise when asked, which they are not.
    """
    has_cuda = any(device.type == "cuda" for device in devices)
    return has_cuda and torch.cuda.is_current_stream_capturing()


def is_watchable(weight: Any) -> bool:
    """Whether every write to a weight would be noticed: a plain tensor, on a known device.

    Its storage must be its own to keep, too (``amp_fx.weights.spread``).
    """
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.device.type in DEVICES
        and weight.layout is torch.strided
        and not is_managed(weight)
    )

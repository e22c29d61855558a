"""The signals that detect writes to weights.

A cached value is fresh until a signal indicates a write. No single signal detects every write;
``CAUGHT_BY`` lists the signals that detect each kind.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_fx.weights.spread import is_managed, parts_of
from amp_fx.weights.watch import engine

if TYPE_CHECKING:
    from collections.abc import Iterable

# Note [What counts as a write]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A value is stale as soon as a weight may have been written, whether or not its bits changed: to
# compare all bits costs as much as the cast that caching saves. So everything counts as a write
# that requests a mutable pointer, including reads through ``data_ptr()`` and NumPy arrays that are
# never written. That errs on the side of computing a value again.
#
# Code of amp_fx must therefore read weights without requesting pointers: through aliases with a
# storage of their own (``cache_entry.read_only``), and ``data_address`` instead of ``data_ptr``.
# Compiled code gets aliases, too (``Prepare.alias``): a kernel that read the weight itself would
# count as a write in every call.
#
# A write without any signal is found by comparing elements (``verify``), or not at all; the docs
# list these cases (``docs/guide/caching.md``).

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
        "cuda": (),
        "xpu": (),
    },
}
"""For each kind of write and device type, the signals that detect the write; one is enough.

Without a signal, ``amp_fx.weight_cache.invalidate`` must be called after the write.

storage
    Code requested a mutable pointer to the weight's storage (``csrc/watch.cpp``). In-place ops do,
    including those on ``.data`` and in inference mode; so do inductor's kernels, collectives,
    NumPy, DLPack and ``data_ptr()``. Foreach and fused kernels on accelerators do not: they request
    ``const_data_ptr`` (``MultiTensorApply.cuh``).
version
    ``Tensor._version`` increased. Writes through ``.data`` do not increase it.
list op
    An op that writes a list of tensors was called (``_foreach_*_``, ``_fused_*_``). amp_fx
    registers a kernel that runs before each of them.
step
    An optimizer's ``step`` ended (``register_optimizer_step_post_hook``). The step may have written
    any of its weights, possibly with custom kernels.
sample
    An element changed since the value was computed (``options={"verify": ...}``).
place
    The weight has a different storage, offset, shape or layout.
"""

DEVICES = ("cpu", "cuda", "xpu")
"""Device types with cached values. MPS kernels do not request pointers from storages, and other
backends were not examined."""


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(after_step)


def install() -> None:
    """Starts detecting list ops, collectives and optimizer steps in this process."""
    with _install_lock:
        _watch_steps()
        engine().watch_list_ops()


_install_lock = threading.Lock()


def after_step(optimizer: Any, *_: Any) -> None:
    """Records a write to all weights of an optimizer."""
    if torch.compiler.is_dynamo_compiling():
        return  # kernels of a compiled step request pointers
    weights = parts_of([p for group in optimizer.param_groups for p in group["params"]])
    engine().mark(weights)
    if is_capturing({weight.device for weight in weights}):
        for weight in weights:
            engine().distrust(weight)  # replays write without a signal


def is_capturing(devices: Iterable[torch.device]) -> bool:
    """Returns True if a CUDA graph is being captured."""
    # Builds of torch without CUDA raise an error, so torch is only queried for CUDA devices.
    has_cuda = any(device.type == "cuda" for device in devices)
    return has_cuda and torch.cuda.is_current_stream_capturing()


def is_watchable(weight: Any) -> bool:
    """Returns True if all writes to a weight are detected.

    This requires a plain tensor on one of ``DEVICES`` that no library shards
    (``amp_fx.weights.spread``).
    """
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.device.type in DEVICES
        and weight.layout is torch.strided
        and not is_managed(weight)
    )


def watch_all(weights: tuple[torch.Tensor, ...]) -> bool:
    """Watches weights for writes; returns False if writes to one of them would not be detected."""
    return all(is_watchable(weight) and engine().watch(weight.detach()) for weight in weights)

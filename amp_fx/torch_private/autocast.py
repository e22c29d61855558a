"""Autocast's state, and the functions with which graphs change it."""

from __future__ import annotations

import contextlib
import gc

import torch
import torch.cuda.amp.common
from torch.amp.autocast_mode import _cast, _enter_autocast, _exit_autocast

from amp_fx.replaced import replaced

enter_autocast = _enter_autocast
exit_autocast = _exit_autocast
cast_tensors = _cast
DisableAutocast = torch._C._DisableAutocast
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Returns True if autocast is enabled in this thread for any device type except MPS."""
privateuse1_name = torch._C._get_privateuse1_backend_name
"""Returns the name of the device type ``privateuseone``, which programs can change."""


def with_cuda_regions() -> contextlib.AbstractContextManager[None]:
    """Context in which regions of ``torch.autocast("cuda")`` are enabled without CUDA, too.

    Relies on ``torch.autocast`` calling ``amp_definitely_not_available`` and ``is_bf16_supported``.
    """
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return replaced(
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    )


def entered_devices() -> set[str]:
    """Returns the device types of regions that were entered and are still referenced.

    Autocast's state does not contain them: ``torch.autocast("cuda")`` disables itself without CUDA.
    Relies on ``torch.autocast.__enter__`` setting the attribute ``prev``.
    """
    objects = [each for each in gc.get_objects() if type(each) is torch.autocast]
    return {region.device for region in objects if "prev" in vars(region)}

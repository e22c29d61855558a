"""Fake tensors, with which AOTAutograd and passes trace."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch._subclasses.meta_utils import MetaTensorDescriber

from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

__all__ = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "fake_tensors_on",
    "unset_fake_temporarily",
    "with_real_tensors",
)


@contextlib.contextmanager
def fake_tensors_on(device: torch.device) -> Iterator[None]:
    """Context in which this thread's fake tensors, and new tensors, are on another device.

    The machine need not have the device (``csrc.guards``). Relies on
    ``MetaTensorDescriber.describe_tensor``, whose result has the device of the fake tensor.
    """
    describe, thread = MetaTensorDescriber.describe_tensor, threading.get_ident()

    def describe_on_device(self: MetaTensorDescriber, t: torch.Tensor, **settings: Any) -> Any:
        description = describe(self, t, **settings)
        is_here = threading.get_ident() == thread
        return dataclasses.replace(description, device=device) if is_here else description

    with replaced((MetaTensorDescriber, "describe_tensor", describe_on_device)), device:
        yield


def with_real_tensors(fake_mode: FakeTensorMode | None) -> AbstractContextManager[None]:
    """Context in which ops may combine fake tensors of a mode with real ones, such as constants."""
    if fake_mode is None:
        return contextlib.nullcontext()
    return replaced((fake_mode, "allow_non_fake_inputs", True))

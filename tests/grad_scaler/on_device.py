"""A CPU that the scaler takes for an accelerator: a value that is read makes the host wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.grad_scaler.reports import StepReport
from amp_fx.grad_scaler.scale_bound import ScaleBound

if TYPE_CHECKING:
    import pytest


class OnDevice(torch.Tensor):
    """A tensor that says that it is not on the CPU."""

    is_cpu = False


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails when a value is read to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Hides from reports and from the bound of the scale that tensors are on the CPU."""
    init, follow = StepReport.__init__, ScaleBound.follow

    def init_on_device(self: StepReport, flags: Any = (), count: Any = tuple) -> None:
        init(self, [flag.as_subclass(OnDevice) for flag in flags], count)

    def follow_on_device(self: ScaleBound, scale: torch.Tensor, *args: float) -> None:
        follow(self, scale.as_subclass(OnDevice), *args)

    patch.setattr(StepReport, "__init__", init_on_device)
    patch.setattr(ScaleBound, "follow", follow_on_device)

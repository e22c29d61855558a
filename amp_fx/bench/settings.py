"""The settings of a run of the benchmark, and the machine and versions it runs on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING

import torch

from amp_fx.devices.low_dtypes import processor_name
from amp_fx.errors import OptionError
from amp_fx.regions.state import autocast_device_types

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run: cases, device, dtype and repeats.

    Attributes:
        device: Where models run.
        dtype: The low dtype.
        compiler: Who builds kernels: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        contenders: Names of who takes part; None for all.
        repeats: Rounds; each contender has one timed block in each of them.
        steps: Calls in a block; None for as many as fill ``timing.BLOCK_SECONDS``.
        layers: Layers of the Transformers; None for as many as the case says.
        tiny: Whether models shrink to next to nothing, to try the benchmark itself.
    """

    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    contenders: tuple[str, ...] | None = None
    repeats: int = 10
    steps: int | None = None
    layers: int | None = None
    tiny: bool = False

    def pick(self, *, tiny: int, cpu: int, accelerator: int | None = None) -> int:
        """A size for this run; accelerators get the CPU's if they have none of their own."""
        if self.tiny:
            return tiny
        if self.device.type == "cpu" or accelerator is None:
            return cpu
        return accelerator

    def num_layers(self, usual: int) -> int:
        """Returns the number of layers for a Transformer that usually has so many."""
        return self.layers or (min(usual, 2) if self.tiny else usual)

    def takes_part(self, contender: str) -> bool:
        """Returns True if a contender was asked for."""
        return self.contenders is None or contender in self.contenders


def choose(option: str, text: str, allowed: Sequence[str]) -> str:
    """Checks for one of a few words."""
    if text not in allowed:
        raise OptionError(f"{option} {text}: not one of {', '.join(allowed)}")
    return text


def parse_device(text: str) -> torch.device:
    """Checks for a device that is here and that autocast knows."""
    known = autocast_device_types()
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise OptionError(f"--device {text}: this machine has no such device; try cpu") from None
    if device.type not in known:
        raise OptionError(f"--device {text}: autocast knows {', '.join(known)} only")
    return device


def machine(device: torch.device) -> dict[str, str | int | float]:
    """The device's name, cores, threads, and how busy the machine was."""
    facts: dict[str, str | int | float] = {"processor": processor_name()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    affinity = getattr(os, "sched_getaffinity", None)  # of this process; not on every system
    facts["cores"] = len(affinity(0)) if affinity else os.cpu_count() or 1
    facts["threads"] = torch.get_num_threads()
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def versions() -> dict[str, str]:
    """The versions and settings that the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "amp_fx": importlib.metadata.version("amp_fx"),
    }

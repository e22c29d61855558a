"""The settings of a run of the benchmark, and a description of the machine."""

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
        device: The device on which models run.
        dtype: The low dtype.
        compiler: The inner compiler: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        contenders: Names of contenders; None for all.
        repeats: Number of rounds. Each contender runs one timed block per round.
        steps: Number of calls in a block; None for as many as take ``timing.BLOCK_SECONDS``.
        layers: Number of layers of the Transformers; None for the default of the case.
        tiny: True for tiny models, to test the benchmark itself.
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
        """Returns the size for this run; ``accelerator`` defaults to ``cpu``."""
        if self.tiny:
            return tiny
        if self.device.type == "cpu" or accelerator is None:
            return cpu
        return accelerator

    def num_layers(self, usual: int) -> int:
        """Returns the number of layers of a Transformer; ``usual`` is the default of the case."""
        return self.layers or (min(usual, 2) if self.tiny else usual)

    def takes_part(self, contender: str) -> bool:
        """Returns True if a contender is selected."""
        return self.contenders is None or contender in self.contenders


def choose(option: str, text: str, allowed: Sequence[str]) -> str:
    """Returns ``text`` if it is allowed, and raises an error otherwise."""
    if text not in allowed:
        raise OptionError(f"{option} {text}: expected one of {', '.join(allowed)}")
    return text


def parse_device(text: str) -> torch.device:
    """Returns a device that exists on this machine and that autocast supports."""
    supported = autocast_device_types()
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise OptionError(f"--device {text}: this machine has no such device: use cpu") from None
    if device.type not in supported:
        raise OptionError(f"--device {text}: autocast only supports {', '.join(supported)}")
    return device


def machine(device: torch.device) -> dict[str, str | int | float]:
    """Returns the names of processor and GPU, the numbers of cores and threads, and the load."""
    facts: dict[str, str | int | float] = {"processor": processor_name()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    affinity = getattr(os, "sched_getaffinity", None)  # does not exist on all systems
    facts["cores"] = len(affinity(0)) if affinity else os.cpu_count() or 1
    facts["threads"] = torch.get_num_threads()
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and amp_fx."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "amp_fx": importlib.metadata.version("amp_fx"),
    }

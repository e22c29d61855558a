"""What a run was measured on, and with which versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from amp_fx.devices.processor import processor_name


def machine(device: torch.device) -> dict[str, str | int | float]:
    """The device's name, cores, threads, and how busy the machine was."""
    facts: dict[str, str | int | float] = {"processor": processor_name()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    facts["cores"] = _num_cores()
    facts["threads"] = torch.get_num_threads()
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "amp_fx": importlib.metadata.version("amp_fx"),
    }


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

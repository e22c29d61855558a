"""Settings of inductor."""

from __future__ import annotations

import torch
from torch._inductor import config, list_mode_options

__all__ = ("config", "list_mode_options")

TorchCompileInductorWrapper = torch._TorchCompileInductorWrapper

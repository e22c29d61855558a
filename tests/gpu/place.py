"""Device of the tests of this folder: CUDA, or what ``AMP_FX_GPU_TRIAL`` names for a trial."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

TRIAL = "AMP_FX_GPU_TRIAL"
"""Environment variable; ``cpu`` runs there what can run there, and ``emulated`` on CUDA tensors in
the host's memory (``tests/cuda``)."""


def _device() -> str:
    trial = os.environ.get(TRIAL, "")
    if trial == "emulated":
        from tests.cuda import needs

        needs.start()
    return "cuda" if torch.cuda.is_available() else trial


DEVICE = _device()
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE, reason="needs CUDA")]
ON_CUDA = pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA")
IS_EMULATED = DEVICE == "cuda" and "pretended" in torch.cuda.get_device_name()
ON_A_GPU = pytest.mark.skipif(
    DEVICE != "cuda" or IS_EMULATED, reason="needs a GPU: streams, CUDA graphs or its allocator"
)


def moved(tree: Any) -> Any:
    """Copies the tensors of a tree to the device, as new leaves."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().to(DEVICE, copy=True)
        return new.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, move, tree)

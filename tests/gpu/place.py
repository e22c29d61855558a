"""Where the tests of this folder run: on CUDA; for a trial, on the device that a variable names."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

TRIAL = "AMP_FX_GPU_TRIAL"
"""Environment variable; ``cpu`` runs there what can run there."""

DEVICE = "cuda" if torch.cuda.is_available() else os.environ.get(TRIAL, "")
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE, reason="needs CUDA")]


def moved(tree: Any) -> Any:
    """A tree with its tensors on the device, as new leaves that are copies."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().to(DEVICE, copy=True)
        return new.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, move, tree)

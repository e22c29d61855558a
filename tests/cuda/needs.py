"""Skips the tests of this folder where CUDA code cannot be executed."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

from amp_fx.tables.presets import torch_version

LEAST = (2, 15)
"""The torch whose code for CUDA, and whose Triton, the executor is written for."""


def missing() -> str | None:
    """Returns the missing requirement for executing CUDA code here; None if there is none.

    Executing it makes the whole process believe that there is a GPU, so it has to be requested by
    ``TRITON_INTERPRET``, which Triton reads when it is imported.
    """
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if torch_version() < LEAST:
        return "needs torch 2.15"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "takes the process for one with a GPU: make test-cuda-code"
    if torch.cuda.is_available() and not _is_pretended():
        return "there is a GPU: hide it by CUDA_VISIBLE_DEVICES=''"
    return None


def _is_pretended() -> bool:
    return "tests.cuda.device" in sys.modules


def start() -> None:
    """Skips the module that calls it if something is missing; else starts the executor."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)
    from tests.cuda import device

    device.start()

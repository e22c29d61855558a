"""Autocast for ``my_device``, from Python (``docs/guide/accelerators.md``)."""

from __future__ import annotations

import importlib

import torch

import amp_fx

importlib.import_module("my_device")

amp_fx.register_device("my_device", dtypes=[torch.bfloat16, torch.float16])

"""Integrations that compile with amp_fx in the Trainer, Accelerate and Lightning.

    Trainer(..., callbacks=[amp_fx.integrations.TrainerCallback()])
    Accelerator(mixed_precision="bf16", dynamo_plugin=amp_fx.integrations.AcceleratePlugin())
    lightning.Trainer(plugins=[amp_fx.integrations.LightningPrecision("bf16-mixed")])

The precision follows the settings of the library, including float32. No code of these libraries is
replaced. `compile_blocks` does the same for custom training loops.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from amp_fx.integrations.blocks import compile_blocks

if TYPE_CHECKING:
    from amp_fx.integrations.hf_accelerate import AcceleratePlugin
    from amp_fx.integrations.hf_trainer import TrainerCallback
    from amp_fx.integrations.pl_precision import LightningPrecision

__all__ = ["AcceleratePlugin", "LightningPrecision", "TrainerCallback", "compile_blocks"]

_LAZY = {
    "AcceleratePlugin": "amp_fx.integrations.hf_accelerate",
    "LightningPrecision": "amp_fx.integrations.pl_precision",
    "TrainerCallback": "amp_fx.integrations.hf_trainer",
}
"""Names that are imported at their first use, because they require the library."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

"""One line for each training library: Trainer, Accelerate and Lightning compile with amp_fx.

    Trainer(..., callbacks=[amp_fx.integrations.TrainerCallback()])
    Accelerator(mixed_precision="bf16", dynamo_plugin=amp_fx.integrations.AcceleratePlugin())
    lightning.Trainer(plugins=[amp_fx.integrations.LightningPrecision("bf16-mixed")])

The library's own settings say which precision holds; where they say float32, so it is. Nothing of
these libraries is changed. `compile_blocks` does the same for loops of your own.
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
"""What is imported when it is first asked for: it takes the library."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

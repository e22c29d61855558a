"""A precision plugin for Lightning."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from amp_fx.grad_scaler import GradScaler
from amp_fx.integrations.blocks import compile_blocks, compile_kwargs

if TYPE_CHECKING:
    import lightning


class LightningPrecision(MixedPrecision):
    """Lightning's mixed precision, with submodules compiled by amp_fx.

    Lightning calls steps instead of ``forward``. The submodules of a ``LightningModule`` are
    therefore compiled in place, and the step runs eagerly in Lightning's region. float16 uses
    ``amp_fx.GradScaler``. If the scaler skips the step of an optimizer, its schedulers with
    ``interval="step"`` do not advance either; with Lightning's own precision they do::

        trainer = lightning.Trainer(plugins=[LightningPrecision("bf16-mixed")])

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: Device type of the region: ``"cpu"`` or ``"cuda"``. Defaults to CUDA if available.
        scaler: The scaler for ``"16-mixed"``; None creates one.
        **torch_compile_kwargs: As for ``amp_fx.integrations.compile_blocks``.

    Attributes:
        compiled: The paths of the compiled modules.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed",
        device: str | None = None,
        scaler: Any = None,
        **torch_compile_kwargs: Any,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)
        compile_kwargs(torch_compile_kwargs)  # raises early if they are invalid
        self._kwargs = torch_compile_kwargs
        self.compiled: list[str] = []

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Compiles the submodules of a module, and lets schedulers follow the scaler."""
        if isinstance(self.scaler, GradScaler):
            _skip_schedulers(module, self.scaler)
        for name, child in module.named_children():
            paths = compile_blocks(child, **self._kwargs)
            self.compiled += [f"{name}.{path}" if path else name for path in paths]
        return module


def _skip_schedulers(module: Any, scaler: GradScaler) -> None:
    """Wraps the hook ``lr_scheduler_step`` of a module, which steps one scheduler.

    Schedulers of epochs and those of a metric advance: they do not count the optimizer's steps.
    """
    step_scheduler = module.lr_scheduler_step

    @functools.wraps(step_scheduler)
    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        follows = metric is None and _counts_steps(module.trainer, scheduler)
        if not (follows and scaler.last_step_of(scheduler.optimizer).skipped):
            step_scheduler(scheduler, metric)

    module.lr_scheduler_step = lr_scheduler_step


def _counts_steps(trainer: lightning.Trainer, scheduler: Any) -> bool:
    configs = trainer.lr_scheduler_configs
    return any(each.scheduler is scheduler and each.interval == "step" for each in configs)

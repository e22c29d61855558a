"""`amp_fx.compile_step`: clip and step in two passes, for training that scales no loss."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.agreement import params_of
from amp_fx.grad_scaler.compiled_step import refuse_needed_closure
from amp_fx.grad_scaler.two_pass import TwoPassStep
from amp_fx.grad_scaler.update_rules import rule_of

if TYPE_CHECKING:
    from torch import Tensor


def compile_step(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    write_grads: bool = False,
    **compile_options: Any,
) -> PlainStep:
    """Make one call out of clipping gradients, stepping, and casting the weights again.

    For training in bfloat16, or in float32; with a scaler take `GradScaler.compile_step`. The call
    gives the numbers of ``torch.nn.utils.clip_grad_norm_`` and ``optimizer.step()``, within
    roundings, in two passes over memory, and writes the low copies of weights that amp_fx keeps, so
    that the next forward finds them fresh::

        compiled = torch.compile(model, backend="amp_fx")
        step = amp_fx.compile_step(optimizer, max_norm=1.0)
        for inputs, targets in data:
            optimizer.zero_grad()
            loss_fn(compiled(inputs), targets).backward()
            step()

    So it is for Adam, AdamW and SGD, with any of their settings but `differentiable`, on dense
    float32 or float64 weights on one device, a CPU or CUDA, from the second step on: the first
    makes the optimizer's state. Everything else runs eagerly: those two functions, one after the
    other. That an optimizer does so for good is told in a warning.

    Gradients that are not finite reach the weights, as they do without this.

    Args:
        optimizer: what to step.
        max_norm: clip gradients to this norm; None does not clip.
        norm_type: the order of the norm.
        write_grads: whether gradients are clipped where they lie, too, which writes 4 bytes more
            for each. Otherwise `.grad` is afterwards what the backward left.
        compile_options: for torch.compile.

    Raises:
        ScalerTypeError: this is no optimizer, or its step needs a closure.
        ScalerValueError: `max_norm` is negative or not a number.
    """
    return PlainStep(
        arguments.optimizer(optimizer),
        max_norm=None if max_norm is None else arguments.max_norm(max_norm),
        norm_type=arguments.norm_type(norm_type),
        write_grads=write_grads,
        compile_options=compile_options,
    )


class PlainStep:
    """What `compile_step` returns; call it once per update.

    Attributes:
        norm: the norm of the gradients at the last call, before clipping: 0-dim. None without
            `max_norm`.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        max_norm: float | None,
        norm_type: float,
        write_grads: bool,
        compile_options: dict[str, Any],
    ) -> None:
        """Compile nothing yet; see `compile_step` for the arguments."""
        refuse_needed_closure(optimizer)
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._norm_type = norm_type
        self._has_warned = False
        self._two_pass = TwoPassStep(
            optimizer,
            max_norm=max_norm,
            norm_type=norm_type,
            writes_grads=write_grads,
            compile_options=compile_options,
        )

    def __call__(self) -> Any:
        """Clip and step.

        Returns:
            What the optimizer's step returns; None from two passes.
        """
        work = self._two_pass.work()
        if work is not None:
            self.norm = self._two_pass(work).norm
            return None
        if not self._has_warned and rule_of(self._optimizer) is None:
            self._has_warned = True
            warnings.warn(
                f"steps of {type(self._optimizer).__name__} run eagerly: two passes are for "
                "torch's own Adam, AdamW and SGD, without hooks.",
                stacklevel=2,
            )
        if self._max_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(
                params_of(self._optimizer), self._max_norm, self._norm_type
            )
        return self._optimizer.step()

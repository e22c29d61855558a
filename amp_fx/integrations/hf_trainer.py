"""A callback for ``transformers.Trainer`` that compiles the model before the Trainer wraps it."""

from __future__ import annotations

import warnings
from typing import Any

import transformers

from amp_fx.errors import DtypeWarning
from amp_fx.integrations.blocks import compile_blocks, compile_kwargs


class TrainerCallback(transformers.TrainerCallback):
    """Compiles the model of a ``transformers.Trainer`` with amp_fx, in place.

    ``TrainingArguments(torch_compile_backend=...)`` only accepts the backends of Accelerate.
    ``bf16=True`` and ``fp16=True`` determine the precision. Without them, everything is float32;
    with ``torch_compile=True``, the other compiler compiles everything. Both cases issue a
    ``DtypeWarning``::

        args = TrainingArguments("out", bf16=True)
        Trainer(model, args, train_dataset=data, callbacks=[TrainerCallback()]).train()

    Args:
        **torch_compile_kwargs: As for ``amp_fx.integrations.compile_blocks``.

    Attributes:
        compiled: The paths of the compiled modules, or the class of the model if it was compiled as
            a whole.
    """

    def __init__(self, **torch_compile_kwargs: Any) -> None:
        compile_kwargs(torch_compile_kwargs)  # raises early if they are invalid
        self._kwargs = torch_compile_kwargs
        self.compiled: list[str] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles the model if it was passed to the Trainer (not ``model_init``)."""
        if args.torch_compile:
            warnings.warn(_TWO_COMPILERS, DtypeWarning, stacklevel=2)
        elif not (args.bf16 or args.fp16):
            warnings.warn(_NO_DTYPE, DtypeWarning, stacklevel=2)
        self._compile(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles a model that the Trainer created with ``model_init``."""
        self._compile(kwargs.get("model"))

    def _compile(self, model: Any) -> None:
        if model is not None:
            paths = compile_blocks(model, **self._kwargs)
            self.compiled = [path or type(model).__name__ for path in paths] or self.compiled


_NO_DTYPE = (
    "the Trainer runs in float32, so amp_fx inserts no casts: pass bf16=True or fp16=True to "
    "TrainingArguments"
)
_TWO_COMPILERS = (
    "torch_compile=True compiles the whole model with another backend, so amp_fx inserts no casts: "
    "remove it from TrainingArguments"
)

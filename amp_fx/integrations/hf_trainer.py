"""A callback for ``transformers.Trainer``: it compiles the model before the Trainer wraps it."""

from __future__ import annotations

import warnings
from typing import Any

import transformers

from amp_fx.errors import DtypeWarning
from amp_fx.integrations.blocks import compile_blocks, compile_kwargs


class TrainerCallback(transformers.TrainerCallback):
    """Compiles the model of a ``transformers.Trainer`` with amp_fx, in place.

    ``TrainingArguments(torch_compile_backend=...)`` takes no backends but those that Accelerate
    lists. ``bf16=True`` and ``fp16=True`` of the arguments say the precision as ever. Without them
    all is float32, and with ``torch_compile=True`` that compiler has everything; both give a
    ``DtypeWarning``::

        args = TrainingArguments("out", bf16=True)
        Trainer(model, args, train_dataset=data, callbacks=[TrainerCallback()]).train()

    Args:
        **torch_compile_kwargs: As for ``amp_fx.integrations.compile_blocks``.

    Attributes:
        compiled: The paths of the modules that were compiled; the name of the model's class if it
            was compiled as a whole.
    """

    def __init__(self, **torch_compile_kwargs: Any) -> None:
        compile_kwargs(torch_compile_kwargs)  # raises now if they are wrong
        self._kwargs = torch_compile_kwargs
        self.compiled: list[str] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles the model, if the Trainer was given one (and no ``model_init``)."""
        if args.torch_compile:
            warnings.warn(_TWO_COMPILERS, DtypeWarning, stacklevel=2)
        elif not (args.bf16 or args.fp16):
            warnings.warn(_NO_DTYPE, DtypeWarning, stacklevel=2)
        self._compile(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles a model that the Trainer has made since."""
        self._compile(kwargs.get("model"))

    def _compile(self, model: Any) -> None:
        if model is not None:
            paths = compile_blocks(model, **self._kwargs)
            self.compiled = [path or type(model).__name__ for path in paths] or self.compiled


_NO_DTYPE = (
    "the Trainer runs in float32, and amp_fx with it: pass bf16=True or fp16=True to "
    "TrainingArguments"
)
_TWO_COMPILERS = (
    "torch_compile=True compiles the whole model with another backend, and amp_fx casts nothing: "
    "leave it out of TrainingArguments"
)

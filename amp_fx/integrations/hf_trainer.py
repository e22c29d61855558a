"""A callback for ``transformers.Trainer``: it compiles the model before the Trainer wraps it."""

from __future__ import annotations

from typing import Any

import transformers

from amp_fx.integrations.blocks import compile_blocks


class TrainerCallback(transformers.TrainerCallback):
    """Compiles the model of a ``transformers.Trainer`` with amp_fx, in place.

    ``TrainingArguments(torch_compile_backend=...)`` takes no backends but those that Accelerate
    lists. ``bf16=True`` and ``fp16=True`` of the arguments say the precision as ever, and without
    them all is float32::

        args = TrainingArguments("out", bf16=True)
        Trainer(model, args, train_dataset=data, callbacks=[TrainerCallback()]).train()

    Args:
        **torch_compile_kwargs: As for ``amp_fx.integrations.compile_blocks``.

    Attributes:
        compiled: The paths of the modules that were compiled.
    """

    def __init__(self, **torch_compile_kwargs: Any) -> None:
        self._kwargs = torch_compile_kwargs
        self.compiled: list[str] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles the model, if the Trainer was given one (and no ``model_init``)."""
        self._compile(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compiles a model that the Trainer has made since."""
        self._compile(kwargs.get("model"))

    def _compile(self, model: Any) -> None:
        if model is not None:
            self.compiled = compile_blocks(model, **self._kwargs) or self.compiled

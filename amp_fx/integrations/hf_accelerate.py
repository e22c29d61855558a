"""A Dynamo plugin for ``accelerate.Accelerator``."""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from amp_fx.integrations.blocks import compile_kwargs


@dataclasses.dataclass
class AcceleratePlugin(TorchDynamoPlugin):
    """Makes ``Accelerator.prepare`` compile with amp_fx.

    Accelerate only accepts backends of a fixed enumeration. ``mixed_precision`` of the accelerator
    determines the precision; with ``"no"``, everything is float32::

        accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=AcceleratePlugin())
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    The fields are those of ``accelerate.utils.TorchDynamoPlugin``. ``backend`` is ignored, and
    ``use_regional_compilation``, which compiles repeated blocks once, defaults to True.

    Relies on ``Accelerator.prepare`` calling ``torch.compile(**plugin.to_kwargs())``.
    """

    backend: Any = DynamoBackend.INDUCTOR
    use_regional_compilation: bool | None = True

    def __post_init__(self) -> None:
        """Completes and checks the fields.

        Raises:
            OptionError: An option is unknown or has an invalid value.
        """
        super().__post_init__()
        self.to_kwargs()

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of ``torch.compile``.

        Raises:
            OptionError: An option is unknown or has an invalid value.
        """
        names = ("mode", "fullgraph", "dynamic", "options", "disable")
        return compile_kwargs({name: getattr(self, name) for name in names})

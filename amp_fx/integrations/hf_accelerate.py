"""A Dynamo plugin for ``accelerate.Accelerator``."""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from amp_fx.integrations.blocks import compile_kwargs


@dataclasses.dataclass
class AcceleratePlugin(TorchDynamoPlugin):
    """Makes ``Accelerator.prepare`` compile with amp_fx.

    Accelerate knows backends by an enumeration that is closed. ``mixed_precision`` of the
    accelerator says the precision as ever; with ``"no"`` all is float32::

        accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=AcceleratePlugin())
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    The fields are those of ``accelerate.utils.TorchDynamoPlugin``; ``backend`` is not looked at,
    and blocks that repeat are compiled once (``use_regional_compilation``) unless it is False.

    Relies on ``Accelerator.prepare`` calling ``torch.compile(**plugin.to_kwargs())``.
    """

    backend: Any = DynamoBackend.INDUCTOR
    use_regional_compilation: bool | None = True

    def __post_init__(self) -> None:
        """Completes the fields.

        Raises:
            OptionError: An option is unknown or has a value that is not allowed.
        """
        super().__post_init__()
        self.to_kwargs()

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``.

        Raises:
            OptionError: An option is unknown or has a value that is not allowed.
        """
        names = ("mode", "fullgraph", "dynamic", "options", "disable")
        return compile_kwargs({name: getattr(self, name) for name in names})

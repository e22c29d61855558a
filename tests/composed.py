"""Modules whose forward is a function, for tests that need few lines of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class Composed(nn.Module):
    """Module with some members, whose forward is a function of it and of the inputs.

    Args:
        function: The forward.
        members: Modules, parameters and buffers by name.
    """

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)

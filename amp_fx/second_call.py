"""Support for functions that take a model and return a function of its inputs."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class SecondCall:
    """Function of a model's inputs, such as the result of ``amp_fx.explain(model)``.

    Warns if it is deleted without a call.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, assigned=("__doc__",), updated=())
        self._name, self._function, self._is_called = name, function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        self._is_called = True
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        """Returns a text that shows the call."""
        return f"<{self._name}(model): call it with the model's inputs, {self._name}(model)(x)>"

    def __del__(self) -> None:
        """Warns if the function was never called."""
        if not self._is_called and not sys.is_finalizing():
            message = f"{self._name}(model) does nothing until it is called: {self._name}(model)(x)"
            warnings.warn(message, stacklevel=2)


def takes_inputs_later(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to return a ``SecondCall``, and to reject inputs of the model."""
    name = f"amp_fx.{function.__name__}"
    parameters = inspect.signature(function).parameters.values()
    num_positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > num_positional:
            message = f"{name} takes a model and returns a function of its inputs: {name}(model)(x)"
            raise TypeError(message)
        result: Any = function(*args, **kwargs)
        return SecondCall(name, result) if inspect.isfunction(result) else result  # type: ignore[return-value]

    return call

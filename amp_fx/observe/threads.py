"""Refuses ops on parameters in threads that a step starts, because modes see only their thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fx.errors import UnsupportedError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Refusal(TorchFunctionMode):
    """Raises an error before an op of a started thread reads or writes a parameter.

    Threads may load data. A thread that outlives the step is free again.
    """

    error: UnsupportedError | None = None
    is_over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch if it takes no parameter and no tensor with gradients."""
        tensors = [] if self.is_over else leaf_tensors((args, kwargs or {}))
        if any(isinstance(t, torch.nn.Parameter) or t.requires_grad for t in tensors):
            self.error = UnsupportedError(
                "the step computes with parameters in a second thread, whose ops are not observed: "
                "call the model in the thread that calls the step"
            )
            raise self.error
        return func(*args, **(kwargs or {}))

    def run(self, function: Callable[[], None]) -> None:
        """Runs the function of a thread under the mode; the refusal itself ends it silently."""
        try:
            with self:
                function()
        except UnsupportedError as error:
            if error is not self.error:
                raise


@contextlib.contextmanager
def refusing_threads() -> Iterator[None]:
    """Context manager that raises an error if a started thread computes with parameters."""
    refusal, owner, start = _Refusal(), threading.get_ident(), threading.Thread.start

    def start_refusing(thread: Any) -> None:
        if threading.get_ident() == owner:
            thread.run = functools.partial(refusal.run, thread.run)
        start(thread)

    try:
        with replaced((threading.Thread, "start", start_refusing)):
            yield
    except Exception:
        if refusal.error is None:
            raise  # else the step failed because its thread did
    finally:
        refusal.is_over = True
    if refusal.error is not None:
        raise refusal.error

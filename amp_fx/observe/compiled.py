"""Finds the options with which amp_fx compiled a program."""

from __future__ import annotations

from typing import Any

import torch


def compiled_with(step: Any) -> tuple[dict[str, Any], bool | None]:
    """Returns the options and ``dynamic`` with which amp_fx compiled a program."""
    backend = backend_of(step)
    if backend is None:
        return {}, None
    given = {name: value for name, value in backend.kwargs.items() if value is not None}
    return {**given.pop("options", {}), **given}, backend.dynamic


def backend_of(step: Any) -> Any:
    """Returns the amp_fx backend that ``torch.compile`` got for a program; None if it got none.

    Relies on the context in compiled modules and in the closures of compiled functions, and on the
    attribute ``_torchdynamo_orig_backend`` of its ``callback``.
    """
    for context in _contexts(wrapper_of(step)):
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if getattr(backend, "compiler_name", None) == "amp_fx":
            return backend
    return None


def wrapper_of(step: Any) -> Any:
    """Returns what ``torch.compile`` returned, without decorators around it."""
    while _contexts(step) == [] and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _contexts(compiled: Any) -> list[Any]:
    cells = getattr(compiled, "__closure__", None) or ()
    known = [vars(compiled).get("dynamo_ctx")] if isinstance(compiled, torch.nn.Module) else []
    known += [cell.cell_contents for cell in cells]
    return [each for each in known if hasattr(each, "callback")]

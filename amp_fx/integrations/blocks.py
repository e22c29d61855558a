"""Compiles a model in place: blocks that it repeats, once for all of them, and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.front.compile import check_names
from amp_fx.options import Options
from amp_fx.torch_private.optimizers import with_own_code

if TYPE_CHECKING:
    from collections.abc import Iterator


def compile_blocks(model: nn.Module, **torch_compile_kwargs: Any) -> list[str]:
    """Compiles the repeated blocks of a model, and what stands next to them, in place.

    Blocks of one class that a ``ModuleList`` holds are compiled each by itself. As they run the
    same code, Dynamo compiles one of them: much less than the whole model. A model that repeats
    nothing is compiled as a whole. Parameters keep their names, and ``state_dict`` its keys
    (``torch.nn.Module.compile``).

    The region around the call says the precision, as for code that is not compiled: call the model
    under ``torch.autocast``. With ``options={"bare_region": True}`` each block is one of its own.

    Args:
        model: The model; one that was compiled before is left alone.
        **torch_compile_kwargs: As for ``torch.compile``, but for ``backend``; ``options`` may hold
            those of this backend (``amp_fx.options.Options``) and inductor's.

    Returns:
        The paths of what is compiled; ``""`` is the model itself.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
        ArgumentTypeError: An argument is unknown.
    """
    kwargs = compile_kwargs(torch_compile_kwargs)
    if _is_compiled(model):
        return []
    found: dict[nn.Module, str] = {}
    for path, module in _regions(model, ""):
        found.setdefault(module, path)  # one that is held twice has its first name
    for module in found:
        _compile(module, kwargs)
    return [*found.values()]


def _compile(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Compiles a module as ``module.compile`` does, which has no effect on torch's own modules.

    Dynamo skips frames of ``torch.nn``, ``forward`` included; it goes into them from a function
    that is not torch's. Each module has a code object of its own, as Dynamo keeps what it compiled
    by these, and only so much for each. Relies on ``torch.nn.Module._compiled_call_impl``.
    """
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**kwargs)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(with_own_code(call), **kwargs)


def compile_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``torch.compile`` for code whose region is around it."""
    check_names(compile_blocks, given)
    options = {"bare_region": False} | dict(given.get("options") or {})
    mode = given.get("mode")
    if mode not in (None, "default"):
        options["mode"] = mode  # torch.compile takes one of the two
    Options.parse(options)
    others = {k: v for k, v in given.items() if k not in ("backend", "mode", "options")}
    return {**others, "backend": "amp_fx", "options": options}


def _regions(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if _is_repeated(module):
        for name, child in module.named_children():
            yield _join(path, name), child
    elif isinstance(module, _CONTAINERS) or any(map(_is_repeated, module.modules())):
        for name, child in module.named_children():
            yield from _regions(child, _join(path, name))
    elif next(module.parameters(), None) is not None:
        yield path, module


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are not called."""


def _is_repeated(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {type(child) for child in module}
    return len(kinds) == 1 and next(module.parameters(), None) is not None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_compiled(model: nn.Module) -> bool:
    """Returns True if a module is compiled already; relies on what ``Module.compile`` sets."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())

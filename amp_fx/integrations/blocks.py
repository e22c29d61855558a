"""Compiles models in place, with repeated blocks compiled once."""

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
    """Compiles the repeated blocks of a model, and the modules next to them, in place.

    Each block in a ``ModuleList`` of blocks of the same class is compiled separately. Because they
    run the same code, Dynamo only compiles one of them, which is much faster than compiling the
    whole model. A model without such blocks is compiled as a whole. Names of parameters and keys of
    ``state_dict`` do not change (``torch.nn.Module.compile``).

    The region around the call determines the precision, so call the model under
    ``torch.autocast``. With ``options={"bare_region": True}``, each block has a separate region.

    Args:
        model: The model; a compiled model is not changed.
        **torch_compile_kwargs: Arguments of ``torch.compile`` except ``backend``. ``options`` may
            contain options of this backend (``amp_fx.options.Options``) and of inductor.

    Returns:
        The paths of the compiled modules; ``""`` is the model itself.

    Raises:
        OptionError: An option is unknown or has an invalid value.
        ArgumentTypeError: An argument is unknown.
    """
    kwargs = compile_kwargs(torch_compile_kwargs)
    if _is_compiled(model):
        return []
    paths: dict[nn.Module, str] = {}
    for path, module in _regions(model, ""):
        paths.setdefault(module, path)  # a module with several paths is compiled once
    for module in paths:
        _compile(module, kwargs)
    return [*paths.values()]


def _compile(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Compiles a module like ``module.compile``, which has no effect on modules of torch.

    Dynamo skips frames of ``torch.nn``, including ``forward``, but inlines them into other
    functions. Each function has a separate code object, because Dynamo limits the compiled variants
    per code object. Relies on ``torch.nn.Module._compiled_call_impl``.
    """
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**kwargs)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(with_own_code(call), **kwargs)


def compile_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of ``torch.compile`` for code inside a region."""
    check_names(compile_blocks, kwargs)
    options = {"bare_region": False} | dict(kwargs.get("options") or {})
    mode = kwargs.get("mode")
    if mode not in (None, "default"):
        options["mode"] = mode  # torch.compile does not accept both mode and options
    Options.parse(options)
    others = {k: v for k, v in kwargs.items() if k not in ("backend", "mode", "options")}
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
"""Container modules, which have no ``forward``."""


def _is_repeated(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {type(child) for child in module}
    return len(kinds) == 1 and next(module.parameters(), None) is not None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_compiled(model: nn.Module) -> bool:
    """Returns True if a module or a submodule was compiled with ``Module.compile``."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())

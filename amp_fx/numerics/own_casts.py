"""Runs compiled code eagerly, with the casts that the backend inserts.

Under ``torch.autocast`` and in modules of ``amp_fx.compile``, the region determines the casts.
``torch.compile(model, backend="amp_fx")`` casts without a region, so each call gets one here: of
modules by hooks, of functions inside of what ``torch.compile`` returned.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from amp_fx.front.settings import RegionSettings
from amp_fx.observe.compiled import backend_of, compiled_with, wrapper_of
from amp_fx.observe.state import known_to
from amp_fx.options import Options
from amp_fx.regions.state import nesting
from amp_fx.torch_private.dynamo import call_instead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def settings_of(compiled: Any) -> RegionSettings | None:
    """Returns the settings of the region that the backend uses for a call; None if it uses none."""
    if nesting() or getattr(compiled, "_amp_fx_settings", None) is not None:
        return None  # it uses the ambient region, or enters one itself
    call = getattr(compiled, "_compiled_call_impl", None) or compiled
    if backend_of(call) is None:
        return None
    options = Options.parse(compiled_with(call)[0])
    return RegionSettings(None, options.dtype, options.policy, options.output_dtype)


_ABOUT_HOOKS = ("Using `torch.compile.module.` when there are global", "steps of .* run eagerly")
"""Warnings about the hooks of this module."""


@contextlib.contextmanager
def regions_of_compiled(step: Any) -> Iterator[None]:
    """Enters the backend's region around each call of a compiled module or function of a step."""
    entered: list[tuple[torch.nn.Module, RegionSettings, Any]] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        settings = settings_of(module)
        if settings is not None:
            region = settings.region(module, args, {})
            region.__enter__()
            entered.append((module, settings, region))

    def after(module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        if not entered or entered[-1][0] is not module:
            return outputs
        _, settings, region = entered.pop()
        region.__exit__(None, None, None)
        return settings.restored(outputs, args)

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, always_call=True),
    ]
    try:
        with warnings.catch_warnings(), _functions_in_regions(step):
            for message in _ABOUT_HOOKS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _functions_in_regions(step: Any) -> Iterator[None]:
    """Enters the backend's region in compiled functions among the variables of a step.

    Functions have no hooks. The variables of the program keep their values.
    """
    known = [wrapper_of(value) for value in known_to(step) if _is_compiled(value)]
    with contextlib.ExitStack() as stack:
        for compiled in dict.fromkeys(known):
            stack.callback(call_instead(compiled, functools.partial(_in_region, compiled)))
        yield


def _is_compiled(value: Any) -> bool:
    """Returns True for functions that the backend compiled without a region."""
    is_function = isinstance(value, types.FunctionType)
    has_region = getattr(value, "_amp_fx_settings", None) is not None
    return is_function and not has_region and backend_of(value) is not None


def _in_region(compiled: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        settings = settings_of(compiled)
        run = original if settings is None else settings.wrap(original, None)
        return run(*args, **kwargs)

    return call

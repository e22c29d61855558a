"""The module that ``amp_fx.compile`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.torch_private.dynamo import NullDecorator, OptimizedModule
from amp_fx.weights.store import STORE, tensors_of

if TYPE_CHECKING:
    from amp_fx.front.settings import RegionSettings


class CompiledModule(OptimizedModule):
    """Compiled module that enters a region for every call."""

    _opt_mod_attributes = OptimizedModule._opt_mod_attributes | {"_amp_fx_settings"}

    def __init__(self, mod: torch.nn.Module, dynamo_ctx: Any, settings: RegionSettings) -> None:
        object.__setattr__(self, "_amp_fx_settings", settings)
        super().__init__(mod, dynamo_ctx)

    def _initialize(self) -> None:
        super()._initialize()
        self.forward = self._amp_fx_settings.wrap(self.forward, self._orig_mod)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module in its region, which includes hooks of the compiled module."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            module: Any = self._modules["_orig_mod"]
            with self._amp_fx_settings.region(module, args, kwargs):
                outputs = module(*args, **kwargs)
            return self._amp_fx_settings.restored(outputs, (args, kwargs))
        if not (self.__dict__["_forward_pre_hooks"] or self.__dict__["_forward_hooks"]):
            return super().__call__(*args, **kwargs)
        call = self._amp_fx_settings.wrap(super().__call__, self._orig_mod)
        return call(*args, **kwargs)

    def extra_repr(self) -> str:
        """Describes the region, and the values that are cached for the module's weights."""
        settings, tensors = self._amp_fx_settings, tensors_of(self._orig_mod)
        entries = {entry for tensor in tensors for entry in STORE.of_weight(tensor)}
        sizes = {id(entry.value): entry.num_bytes for entry in entries if entry.num_bytes}
        policy = "default" if settings.policy is None else settings.policy.name
        dtype = "default" if settings.dtype is None else dtype_name(settings.dtype)
        return f"policy={policy}, dtype={dtype}, cached={sum(sizes.values()):,} bytes"

    def __bool__(self) -> bool:
        """Returns the truth value of the original module.

        ``OptimizedModule`` would call ``len``, which may raise.
        """
        return bool(self._orig_mod)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the module like ``OptimizedModule``, with the region's settings."""
        return type(self), (self._orig_mod, self.dynamo_ctx, self._amp_fx_settings)


def wrap_module(module: torch.nn.Module, compiled: Any, settings: RegionSettings) -> CompiledModule:
    """Returns a compiled module that enters a region for every call."""
    if compiled is module:
        return CompiledModule(module, NullDecorator(), settings)
    # Without get_compiler_config and the like of ``compiled``: torch.compile refuses a module that
    # has the first, and would call the original without the region because of the others.
    return CompiledModule(module, compiled.dynamo_ctx, settings)

"""``amp_fx.compile``: ``torch.compile`` with this backend, every call of it in a region.

The region stands around the compiled callable, so that Dynamo sees its dtypes while it
captures, its guards on the state of autocast hold from call to call, and whatever it leaves
to Python (graph breaks, skipped and disabled functions, all of it under
``torch.compiler.set_stance("force_eager")``) runs in the same mixed precision.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from amp_fx.errors import CompileTargetError, OptionError
from amp_fx.options import Options
from amp_fx.policies.policy import as_policy
from amp_fx.regions.region import autocast
from amp_fx.regions.state import autocast_device_types

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from amp_fx.policies.policy import Policy

T = TypeVar("T", bound="Callable[..., Any]")


@dataclasses.dataclass(frozen=True)
class RegionSettings:
    """The region that every call of a compiled program runs in.

    Attributes:
        device_type: Its device type; None takes that of the tensors of each call.
        dtype: Its low dtype; None takes ``torch.get_autocast_dtype``.
        policy: Its policy; None keeps that of the region around the call.
    """

    device_type: str | None
    dtype: torch.dtype | None
    policy: Policy | None

    def region(
        self, module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """The region for one call of a module, or of a function if it is None."""
        device_type = self.device_type or _device_type_of(module, args, kwargs)
        if self.policy is None:
            return torch.autocast(device_type, self.dtype)
        return autocast(device_type, self.dtype, policy=self.policy)

    def wrap(self, call: Callable[..., Any], module: torch.nn.Module | None) -> Callable[..., Any]:
        """A callable with every call of it inside the region."""

        @functools.wraps(call)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self.region(module, args, kwargs):
                return call(*args, **kwargs)

        for name in [n for n in in_region.__dict__ if n.startswith("_torchdynamo")]:
            # Dynamo would go straight to the function that these name, without the region.
            del in_region.__dict__[name]
        return in_region


def _device_type_of(
    module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """An accelerator if the module or an argument is on one that autocast knows, else the CPU."""
    found = {arg.device.type for arg in _tensors((*args, *kwargs.values()))}
    parameter = None if module is None else _first_parameter(module)
    if parameter is not None:
        found.add(parameter.device.type)
    if found <= {"cpu"}:
        return "cpu"
    for device_type in autocast_device_types():
        if device_type in found:
            return device_type
    return "cpu"


def _first_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """Any parameter; ``module.parameters()`` takes ten times as long to give its first."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return found or [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


@overload
def compile(  # noqa: A001
    model: T,
    *,
    device_type: str | None = ...,
    dtype: torch.dtype | str | None = ...,
    policy: Policy | str | os.PathLike[str] | None = ...,
    weight_cache: bool = ...,
    **torch_compile_kwargs: Any,
) -> T: ...


@overload
def compile(  # noqa: A001
    model: None = None,
    *,
    device_type: str | None = ...,
    dtype: torch.dtype | str | None = ...,
    policy: Policy | str | os.PathLike[str] | None = ...,
    weight_cache: bool = ...,
    **torch_compile_kwargs: Any,
) -> Callable[[T], T]: ...


def compile(  # noqa: A001
    model: Any = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    weight_cache: bool = True,
    **torch_compile_kwargs: Any,
) -> Any:
    """Compiles a module or a function in mixed precision; outputs keep autocast's dtypes.

    Args:
        model: A module or a function. Without it a decorator is returned.
        device_type: Of the region around every call; None takes an accelerator that the
            module or an argument of the call is on, else the CPU.
        dtype: What low-precision ops run in, or its name; by default
            ``torch.get_autocast_dtype``. One that the device does not support turns the
            region off with the warning that ``torch.autocast`` gives.
        policy: Which op is cast how: a ``Policy``, the name of a preset or the path of a
            policy file (``*.toml``), read now. None keeps that of a region around the call,
            else that of PyTorch.
        weight_cache: Whether casts of weights are kept across calls.
        **torch_compile_kwargs: As for ``torch.compile``, but for ``backend``; ``options``
            may hold those of this backend (``amp_fx.options.Options``) and inductor's.

    Returns:
        A module for a module, which shares its parameters, else a function.

    Raises:
        CompileTargetError: What is given is neither a module nor a function.
        RegionError: The device type cannot autocast.
        OptionError: An option is unknown or has a value that is not allowed.
        PolicyError: The policy is none of these.
    """
    settings = RegionSettings(
        device_type,
        None if dtype is None else as_dtype(dtype),
        None if policy is None else as_policy(policy),
    )
    if device_type is not None:
        autocast(device_type, settings.dtype)  # says now what there is to say about it
    kwargs = _backend_kwargs(weight_cache, dict(torch_compile_kwargs))
    if model is None:
        return lambda target: _compile(target, settings, kwargs)
    return _compile(model, settings, kwargs)


def as_dtype(dtype: object) -> torch.dtype:
    """The dtype that somebody means.

    Raises:
        OptionError: It is neither a dtype nor the name of one.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(
            f"dtype={dtype!r} is no dtype: give torch.bfloat16, torch.float16 or such a name"
        )
    return found


_LOOKUP = threading.Lock()
"""torch.compile registers a backend at its first use, and fails if two threads do so at once."""


def _compile(target: Any, settings: RegionSettings, kwargs: dict[str, Any]) -> Any:
    if isinstance(target, type) or not callable(target):
        what = f"the class {target.__name__}" if isinstance(target, type) else repr(target)
        raise CompileTargetError(
            f"amp_fx.compile takes a torch.nn.Module or a function, not {what}"
        )
    with _LOOKUP:
        compiled = torch.compile(target, **kwargs)
    if not isinstance(target, torch.nn.Module):
        return settings.wrap(compiled, None)
    from amp_fx.front.compiled_module import wrap_module  # torch._dynamo takes seconds to import

    return wrap_module(target, compiled, settings)


def _backend_kwargs(weight_cache: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch.compile; its ``mode`` and ``options`` exclude each other there."""
    if "backend" in kwargs:
        raise OptionError(
            f"backend={kwargs['backend']!r}: amp_fx.compile is torch.compile with "
            "backend='amp_fx'; what compiles its graphs is options={\"compiler\": ...}"
        )
    options = dict(kwargs.pop("options", None) or {})
    for name in ("dtype", "policy", "weight_cache"):
        if name in options:
            raise OptionError(f"options={{{name!r}: ...}}: give {name} to amp_fx.compile itself")
    # The region is around the call: a graph outside of any is meant to be in full precision.
    options |= {"weight_cache": weight_cache, "bare_region": False}
    mode = kwargs.pop("mode", None)
    if mode is not None:
        options["mode"] = mode
    Options.parse(options)
    return {**kwargs, "backend": "amp_fx", "options": options}

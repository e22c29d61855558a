"""``amp_fx.compile``: ``torch.compile`` with this backend, every call of it in a region.

The region stands around the compiled callable, so that Dynamo sees its dtypes while it
captures, its guards on the state of autocast hold from call to call, and whatever it leaves
to Python (graph breaks, skipped and disabled functions, all of it under
``torch.compiler.set_stance("force_eager")``) runs in the same mixed precision.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from amp_fx.eager.region import check_device_type
from amp_fx.errors import ArgumentTypeError, OptionError, did_you_mean
from amp_fx.front.settings import RegionSettings, is_missing
from amp_fx.options import NAMES, Options, as_low_dtype, as_output_dtype
from amp_fx.policies.policy import as_policy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy

T = TypeVar("T", bound="Callable[..., Any]")


@overload
def compile(  # noqa: A001
    model: T,
    *,
    device_type: str | None = ...,
    dtype: torch.dtype | str | None = ...,
    policy: Policy | str | os.PathLike[str] | None = ...,
    output_dtype: str = ...,
    weight_cache: bool | str = ...,
    numerics: str | None = ...,
    **torch_compile_kwargs: Any,
) -> T: ...


@overload
def compile(  # noqa: A001
    model: None = None,
    *,
    device_type: str | None = ...,
    dtype: torch.dtype | str | None = ...,
    policy: Policy | str | os.PathLike[str] | None = ...,
    output_dtype: str = ...,
    weight_cache: bool | str = ...,
    numerics: str | None = ...,
    **torch_compile_kwargs: Any,
) -> Callable[[T], T]: ...


def compile(  # noqa: A001
    model: Any = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    output_dtype: str = "autocast",
    weight_cache: bool | str = True,
    numerics: str | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """Compiles a module or a function in mixed precision, with a region around every call.

    So outputs are low where autocast leaves them low; ``torch.compile(..., backend="amp_fx")``
    gives those of the program, float32. ``output_dtype`` chooses.

    Args:
        model: A module or a function. Without it a decorator is returned.
        device_type: Of the region around every call; None takes an accelerator that the
            module or an argument of the call is on, else the CPU. ``"cuda"`` on a machine without
            CUDA turns the region off, with a warning.
        dtype: What low-precision ops run in, or its name (``"bf16"``, ``"half"``). By default
            that of a region around the call, else what the policy says, else bfloat16 where
            the device has units for it (``amp_fx.options.default_dtype``).
        policy: Which op is cast how: a ``Policy``, the name of a preset or the path of a
            policy file (``*.toml``), read now. None keeps that of a region around the call,
            else that of PyTorch.
        output_dtype: ``"autocast"``: outputs have the dtypes that ``torch.autocast`` around the
            call would leave; ``"original"``: what it would leave low comes back as float32, as
            the bare ``torch.compile(..., backend="amp_fx")`` has it. Take it, or ``.float()``,
            where a loss follows outside of the region: in float16 it overflows. Tensors in
            containers that ``torch.utils._pytree`` does not know stay as they are.
        weight_cache: Whether values computed from weights are cached across calls; ``"training"``:
            also in training on the CPU.
        numerics: ``"eager"`` asks for the bits of eager autocast from compiled code; see
            ``amp_fx.options.Options`` for that and for inductor's own modes.
        **torch_compile_kwargs: As for ``torch.compile``, but for ``backend``; ``options``
            may hold those of this backend (``amp_fx.options.Options``) and inductor's.

    Returns:
        A module for a module, which shares its parameters, else a function.

    Raises:
        ArgumentTypeError: What is given is neither a module nor a function, or an argument is
            unknown.
        RegionError: The device type cannot autocast.
        OptionError: An option is unknown or has a value that is not allowed.
        PolicyError: The policy is none of these.
    """
    settings = RegionSettings(
        device_type,
        None if dtype is None else as_low_dtype(dtype),
        None if policy is None else as_policy(policy),
        as_output_dtype(output_dtype),
    )
    if device_type is not None:
        check_device_type(device_type)
    if is_missing(device_type):
        warnings.warn(_NO_CUDA, stacklevel=2)
    kwargs = _backend_kwargs(weight_cache, numerics, dict(torch_compile_kwargs))
    if model is None:
        return lambda target: _compile(target, settings, kwargs)
    return _compile(model, settings, kwargs)


_NO_CUDA = (
    "device_type='cuda': this machine has no CUDA device, so the program runs without autocast; "
    "omit device_type to follow the device of the tensors"
)

_LOOKUP = threading.Lock()
"""torch.compile registers a backend at its first use, and fails if two threads do so at once."""


def _compile(target: Any, settings: RegionSettings, kwargs: dict[str, Any]) -> Any:
    if isinstance(target, type) or not callable(target):
        what = f"the class {target.__name__}" if isinstance(target, type) else repr(target)
        raise ArgumentTypeError(f"amp_fx.compile takes a torch.nn.Module or a function, not {what}")
    with _LOOKUP:
        compiled = torch.compile(target, **kwargs)
    if not isinstance(target, torch.nn.Module):
        wrapped: Any = settings.wrap(compiled, None)
        wrapped._amp_fx_settings = settings
        return wrapped
    from amp_fx.front.compiled_module import wrap_module  # torch._dynamo takes seconds to import

    return wrap_module(target, compiled, settings)


def _backend_kwargs(
    weight_cache: bool | str, numerics: str | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of torch.compile; its ``mode`` and ``options`` exclude each other there."""
    if "backend" in kwargs:
        raise OptionError(
            f"backend={kwargs['backend']!r}: amp_fx.compile is torch.compile with "
            "backend='amp_fx'; what compiles its graphs is options={\"compiler\": ...}"
        )
    check_names(compile, kwargs)
    options = dict(kwargs.pop("options", None) or {})
    for name in ("dtype", "output_dtype", "policy", "weight_cache", "numerics"):
        if name in options:
            raise OptionError(f"options={{{name!r}: ...}}: give {name} to amp_fx.compile itself")
    # The region is around the call: a graph outside of any is meant to be in full precision.
    options |= {"weight_cache": weight_cache, "bare_region": False}
    if numerics is not None:
        options["numerics"] = numerics
    mode = kwargs.pop("mode", None)
    if mode is not None:
        options["mode"] = mode
    Options.parse(options)
    return {**kwargs, "backend": "amp_fx", "options": options}


def check_names(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raises an error for arguments that neither a function nor ``torch.compile`` has.

    Args:
        function: What the user called.
        kwargs: The arguments.

    Raises:
        ArgumentTypeError: Names the argument, and one that is like it.
    """
    known = {*inspect.signature(function).parameters, *inspect.signature(torch.compile).parameters}
    for name in kwargs:
        if name in NAMES and name not in known:
            raise ArgumentTypeError(f"{name} is an option: pass options={{{name!r}: ...}}")
        if name not in known:
            raise ArgumentTypeError(
                f"amp_fx's {function.__name__} has no argument {name!r}{did_you_mean(name, known)}"
            )

"""``amp_fx.compile``: ``torch.compile`` with this backend, and a region around every call.

The region surrounds the compiled callable. Dynamo therefore captures the dtypes of the region, its
guards on the autocast state hold for all calls, and Python code between graphs (after graph breaks,
in skipped functions, or under ``torch.compiler.set_stance("force_eager")``) runs in the same
precision.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from amp_fx.errors import ArgumentTypeError, OptionError, did_you_mean
from amp_fx.front.settings import RegionSettings, is_missing, unwrap
from amp_fx.options import NAMES, Options, as_low_dtype, as_output_dtype
from amp_fx.policies.policy import as_policy
from amp_fx.regions.state import check_device_type

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
    """Compiles a module or function in mixed precision, with a region around every call.

    The region is the innermost one, as regions of ``torch.autocast`` nest: a call inside
    ``torch.autocast(..., enabled=False)`` runs in mixed precision, too. Only a program that is
    compiled with ``torch.compile(..., backend="amp_fx")`` is turned off by such a region.

    Args:
        model: A module or a function. If omitted, returns a decorator. If it is compiled already,
            its original is compiled with the new settings.
        device_type: Device type of the region. Defaults to the accelerator of the module or of an
            argument of the call, else the CPU. ``"cuda"`` on a machine without CUDA disables the
            region with a warning.
        dtype: The dtype of low-precision ops, or its name (``"bf16"``, ``"half"``). Defaults to the
            dtype of a region around the call, else that of the policy, else bfloat16 if the device
            has hardware support (``amp_fx.options.default_dtype``).
        policy: The cast policy of each op: a ``Policy``, the name of a preset or the path of a
            policy file (``*.toml``), which is read immediately. Defaults to the policy of a region
            around the call, else PyTorch's.
        output_dtype: ``"autocast"`` returns the dtypes of a call under ``torch.autocast``;
            ``"original"`` casts low outputs to float32, like ``torch.compile(...,
            backend="amp_fx")``. Use ``"original"`` or ``.float()`` if the loss is computed outside
            of the region, because it may overflow in float16. Tensors in containers that are not
            registered with ``torch.utils._pytree`` are not cast.
        weight_cache: Whether values computed from weights are cached across calls. ``"training"``
            also caches them in training.
        numerics: ``"eager"`` makes compiled code return the bits of eager autocast. See
            ``amp_fx.options.Options`` for this and other modes.
        **torch_compile_kwargs: Arguments of ``torch.compile`` except ``backend``. ``options`` may
            contain options of this backend (``amp_fx.options.Options``) and of inductor.

    Returns:
        For a module, a module that shares its parameters; for a function, a function.

    Raises:
        ArgumentTypeError: ``model`` is neither a module nor a function, or an argument is unknown.
        RegionError: The device type cannot autocast.
        OptionError: An option is unknown or has an invalid value.
        PolicyError: The policy is invalid.
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
"""``torch.compile`` registers a backend at its first use, which fails in two threads at once."""


def _compile(target: Any, settings: RegionSettings, kwargs: dict[str, Any]) -> Any:
    if isinstance(target, type) or not callable(target):
        text = f"the class {target.__name__}" if isinstance(target, type) else repr(target)
        raise ArgumentTypeError(
            f"amp_fx.compile expects a torch.nn.Module or a function, got {text}"
        )
    target, _ = unwrap(target, "amp_fx.compile")
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
    """Returns the arguments of ``torch.compile``, with ``mode`` as an option.

    ``torch.compile`` does not accept ``mode`` together with ``options``.
    """
    if "backend" in kwargs:
        raise OptionError(
            f"backend={kwargs['backend']!r} is not allowed: amp_fx.compile always uses "
            "backend='amp_fx'. To choose the compiler of its graphs, pass "
            'options={"compiler": ...}'
        )
    check_names(compile, kwargs)
    options = dict(kwargs.pop("options", None) or {})
    for name in ("dtype", "output_dtype", "policy", "weight_cache", "numerics"):
        if name in options:
            raise OptionError(
                f"options={{{name!r}: ...}} is not allowed: pass {name} as an argument of "
                "amp_fx.compile"
            )
    # The region surrounds the call, so graphs outside of any region run in full precision.
    options |= {"weight_cache": weight_cache, "bare_region": False}
    if numerics is not None:
        options["numerics"] = numerics
    mode = kwargs.pop("mode", None)
    if mode is not None:
        options["mode"] = mode
    Options.parse(options)
    return {**kwargs, "backend": "amp_fx", "options": options}


def check_names(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raises an error for arguments that neither a function nor ``torch.compile`` accepts.

    Args:
        function: The function that the user called.
        kwargs: The arguments.

    Raises:
        ArgumentTypeError: An argument is unknown. The message suggests a similar one.
    """
    accepted = {
        *inspect.signature(function).parameters,
        *inspect.signature(torch.compile).parameters,
    }
    for name in kwargs:
        if name in NAMES and name not in accepted:
            raise ArgumentTypeError(f"{name} is an option: pass options={{{name!r}: ...}}")
        if name not in accepted:
            hint = did_you_mean(name, accepted)
            raise ArgumentTypeError(f"amp_fx's {function.__name__} has no argument {name!r}{hint}")

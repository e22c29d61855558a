"""The region that every call of a compiled program runs in, as a value."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx import dtypes
from amp_fx.eager.region import autocast
from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.options import default_dtype
from amp_fx.policies.policy import as_policy
from amp_fx.regions.state import autocast_device_types
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from amp_fx.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class RegionSettings:
    """The region that every call of a compiled program runs in.

    Attributes:
        device_type: Its device type; None takes that of the tensors of each call.
        dtype: Its low dtype. None takes what the policy says, inside of another region that
            region's, else ``amp_fx.options.default_dtype``.
        policy: Its policy; None keeps that of the region around the call.
        output_dtype: ``"autocast"``: outputs as the region leaves them; ``"original"``: those
            that it made low are float32.
    """

    device_type: str | None
    dtype: torch.dtype | None
    policy: Policy | None
    output_dtype: str = "autocast"

    def region(
        self, module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """The region for one call of a module, or of a function if it is None."""
        is_open = self.device_type is None or self.dtype is None
        devices = _devices_of(module, args, kwargs) if is_open else set()
        device_type = self.device_type or _device_type_of(devices)
        dtype = self.dtype or self._low_dtype(device_type, devices)
        is_on = not is_missing(self.device_type)
        if self.policy is None:
            return torch.autocast(device_type, dtype, is_on)
        return autocast(device_type, dtype, is_on, policy=self.policy)

    def _low_dtype(self, device_type: str, devices: set[tuple[str, int]]) -> torch.dtype | None:
        """Returns the policy of a region that names none; None leaves it to the region around."""
        if torch.is_autocast_enabled(device_type):
            return None
        if self.policy is not None and self.policy.low_dtype(device_type) is not None:
            return None
        indices = tuple(index for kind, index in devices if kind == device_type)
        return default_dtype(device_type, indices, warns=True)

    def wrap(self, call: Callable[..., Any], module: torch.nn.Module | None) -> Callable[..., Any]:
        """A callable with every call of it inside the region."""

        @functools.wraps(call)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self.region(module, args, kwargs):
                outputs = call(*args, **kwargs)
            return self.restored(outputs, (args, kwargs))

        for name in [n for n in in_region.__dict__ if n.startswith("_torchdynamo")]:
            # Dynamo would go straight to the function that these name, without the region.
            del in_region.__dict__[name]
        return in_region

    def restored(self, outputs: Any, inputs: Any) -> Any:
        """Outputs of a call in the dtypes that were asked for; tensors that it was given stay."""
        if self.output_dtype == "autocast":
            return outputs
        given = {id(leaf) for leaf in pytree.tree_leaves(inputs)}

        def restore(tensor: torch.Tensor) -> torch.Tensor:
            is_changed = dtypes.is_low(tensor.dtype) and id(tensor) not in given
            return tensor.float() if is_changed else tensor

        return pytree.tree_map_only(torch.Tensor, restore, outputs)


def is_missing(device_type: str | None) -> bool:
    """Returns True for CUDA on a machine without it, where autocast is off."""
    return device_type == "cuda" and not torch.cuda.is_available()


def _devices_of(
    module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[tuple[str, int]]:
    """Types and indices of the devices that the arguments and the module are on."""
    found = [arg.device for arg in _tensors((*args, *kwargs.values()))]
    parameter = None if module is None else _first_parameter(module)
    if parameter is not None:
        found.append(parameter.device)
    return {(device.type, device.index or 0) for device in found}


def _device_type_of(devices: set[tuple[str, int]]) -> str:
    """An accelerator if there is one among them that autocast knows, else the CPU."""
    found = {device_type for device_type, _ in devices}
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


def as_dtype(dtype: object) -> torch.dtype:
    """The dtype that somebody means."""
    found = dtypes.as_dtype(dtype)
    if found is None:
        raise OptionError(
            f"dtype={dtype!r} is not a dtype: give torch.bfloat16, torch.float16 or such a name"
        )
    return found


NOT_COMPILED = RegionSettings(None, None, None)
"""The settings of what ``amp_fx.compile`` has not compiled."""


def unwrap(step: Any, name: str) -> tuple[Callable[..., Any], RegionSettings]:
    """Returns what was compiled, and the region that ``amp_fx.compile`` puts around it."""
    if isinstance(step, type) or not callable(step):
        raise ArgumentTypeError(f"{name} takes a module or a function, not {step!r}")
    settings = vars(step).get("_amp_fx_settings") if hasattr(step, "__dict__") else None
    if settings is not None and not isinstance(step, torch.nn.Module):
        step = step.__wrapped__
    inner = getattr(step, "_orig_mod", None)
    if inner is None and not getattr(step, "_torchdynamo_disable", False):
        inner = getattr(step, "_torchdynamo_orig_callable", None)
    found = inner if callable(inner) else step
    return found, settings or NOT_COMPILED


def policy_for(policy: Any, given: RegionSettings) -> Policy:
    """The policy that is meant: the one given, that of the compiled step, or the ambient one."""
    if policy is None:
        return given.policy or ambient_policy() or as_policy("torch")
    return as_policy(policy)

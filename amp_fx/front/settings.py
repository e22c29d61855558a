"""Settings of the region around every call of a compiled program."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from amp_fx import dtypes
from amp_fx.eager.region import autocast
from amp_fx.errors import ArgumentTypeError
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.options import default_dtype
from amp_fx.policies.policy import as_policy
from amp_fx.regions.state import autocast_device_types
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from amp_fx.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class RegionSettings:
    """Settings of the region around every call of a compiled program.

    Attributes:
        device_type: The device type; None for that of the tensors of each call.
        dtype: The low dtype; None for that of the surrounding region, else of the policy, else
            ``amp_fx.options.default_dtype``.
        policy: The policy; None for that of the surrounding region.
        output_dtype: ``"autocast"`` returns outputs unchanged; ``"original"`` returns low outputs
            in float32.
    """

    device_type: str | None
    dtype: torch.dtype | None
    policy: Policy | None
    output_dtype: str = "autocast"

    def region(
        self, module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Returns the region for one call of ``module``, or of a function if that is None."""
        depends_on_devices = self.device_type is None or self.dtype is None
        devices = _devices_of(module, args, kwargs) if depends_on_devices else set()
        device_type = self.device_type or _device_type_of(devices)
        dtype = self.dtype or self._low_dtype(device_type, devices)
        is_enabled = not is_missing(self.device_type)
        if self.policy is None:
            return torch.autocast(device_type, dtype, is_enabled)
        return autocast(device_type, dtype, is_enabled, policy=self.policy)

    def _low_dtype(self, device_type: str, devices: set[torch.device]) -> torch.dtype | None:
        """Returns the default dtype; None if the surrounding region or the policy has one."""
        if torch.is_autocast_enabled(device_type):
            return None
        if self.policy is not None and self.policy.low_dtype(device_type) is not None:
            return None
        indices = [device.index or 0 for device in devices if device.type == device_type]
        return default_dtype(device_type, indices, warns=True)

    def wrap(self, call: Callable[..., Any], module: torch.nn.Module | None) -> Callable[..., Any]:
        """Wraps a callable so that every call runs in the region."""

        @functools.wraps(call)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self.region(module, args, kwargs):
                outputs = call(*args, **kwargs)
            if isinstance(outputs, types.GeneratorType):
                return self._resumed(outputs, module, args, kwargs)
            return self.restored(outputs, (args, kwargs))

        for name in [n for n in in_region.__dict__ if n.startswith("_torchdynamo")]:
            # Dynamo would call the functions in these attributes directly, without the region.
            del in_region.__dict__[name]
        in_region.__dict__.pop("get_compiler_config", None)  # torch.compile refuses what has it
        return in_region

    def _resumed(
        self,
        generator: Generator[Any, Any, Any],
        module: torch.nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Generator[Any, Any, Any]:
        """Yields the items of a generator, and enters the region each time it resumes."""
        sent = None
        while True:
            # The region must not be active while the caller uses an item.
            with self.region(module, args, kwargs):
                try:
                    item = generator.send(sent)
                except StopIteration as end:
                    return end.value
            sent = yield self.restored(item, (args, kwargs))

    def restored(self, outputs: Any, inputs: Any) -> Any:
        """Applies ``output_dtype`` to outputs of a call, except inputs that are returned."""
        if self.output_dtype == "autocast":
            return outputs
        input_ids = {id(leaf) for leaf in pytree.tree_leaves(inputs)}

        def restore(tensor: torch.Tensor) -> torch.Tensor:
            is_lowered = dtypes.is_low(tensor.dtype) and id(tensor) not in input_ids
            return tensor.float() if is_lowered else tensor

        return pytree.tree_map_only(torch.Tensor, restore, outputs)


def is_missing(device_type: str | None) -> bool:
    """Returns True if the device type is CUDA and this machine has no CUDA device."""
    return device_type == "cuda" and not torch.cuda.is_available()


def _devices_of(
    module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[torch.device]:
    """Returns the devices of the arguments and the module."""
    devices = {arg.device for arg in _tensors((*args, *kwargs.values()))}
    parameter = None if module is None else _first_parameter(module)
    if parameter is not None:
        devices.add(parameter.device)
    return devices


def _device_type_of(devices: set[torch.device]) -> str:
    """Returns the type of an accelerator with autocast, or the CPU if there is none."""
    device_types = {device.type for device in devices}
    if device_types <= {"cpu"}:
        return "cpu"
    for device_type in autocast_device_types():
        if device_type in device_types:
            return device_type
    return "cpu"


def _first_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """Returns any parameter, ten times faster than ``next(module.parameters())``."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        first = None if child is None else _first_parameter(child)
        if first is not None:
            return first
    return None


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tensors or [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


NOT_COMPILED = RegionSettings(None, None, None)
"""Settings of programs that ``amp_fx.compile`` did not compile."""


def unwrap(step: Any, name: str) -> tuple[Callable[..., Any], RegionSettings]:
    """Returns the original of a compiled program, and the settings of its region."""
    if isinstance(step, type) or not callable(step):
        raise ArgumentTypeError(f"{name} expects a module or a function, got {step!r}")
    settings = vars(step).get("_amp_fx_settings") if hasattr(step, "__dict__") else None
    if settings is not None and not isinstance(step, torch.nn.Module):
        step = step.__wrapped__
    inner = getattr(step, "_orig_mod", None)
    if inner is None and not getattr(step, "_torchdynamo_disable", False):
        inner = getattr(step, "_torchdynamo_orig_callable", None)
    original = inner if callable(inner) else step
    return original, settings or NOT_COMPILED


def policy_for(policy: Any, settings: RegionSettings) -> Policy:
    """Returns ``policy``, or else that of the compiled program, the ambient one or PyTorch's."""
    if policy is None:
        return settings.policy or ambient_policy() or as_policy("torch")
    return as_policy(policy)

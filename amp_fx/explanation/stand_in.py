"""A copy of a model and its inputs that costs nothing to run: fake tensors.

What is explained is never the user's model but this copy, so that no parameter, buffer or
attribute changes. Where the model's device is not there (``device_type="cuda"`` without a
GPU, ``device="meta"``), the copy stands on the CPU and the CPU takes that device's op tables:
fake tensors of a device that torch was built without cannot be indexed or differentiated.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from amp_fx.errors import ExplainError, OptionError
from amp_fx.graphs.values import storage_id
from amp_fx.regions.state import autocast_device_types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What is run in the model's place.

    Attributes:
        program: The copy of the model; a function as it is.
        args: Copies of the positional arguments.
        kwargs: Copies of the keyword arguments.
        fake_mode: The mode of its tensors; None where they are real.
        device_type: The device type whose autocast is explained.
        imagined: Whether the CPU stands for that device.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake_mode: FakeTensorMode | None
    device_type: str
    imagined: bool


def fake_stand_in(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_type: str | None,
) -> StandIn:
    """A copy whose tensors are fake."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    present = {tensor.device.type for tensor in tensors}
    target = target_device(present, device_type)
    imagined = target != "cpu" and not (target in present and is_usable(target))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_shape_env(), static_shapes=True)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode, "cpu" if imagined else None, target)
        return made[id(tensor)]

    for tensor in tensors:
        fake(tensor)
    program = _copy_module(model, made) if isinstance(model, torch.nn.Module) else model
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    return StandIn(program, fake_args, fake_kwargs, mode, target, imagined)


def _shape_env() -> ShapeEnv:
    """One for the sizes that loops invent; sizes and numbers that depend on values are refused."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def real_stand_in(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], like: StandIn
) -> StandIn | None:
    """A copy whose tensors are real, for programs that look at numbers; None if there are none."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    is_real = all(not isinstance(t, FakeTensor) and t.device.type != "meta" for t in tensors)
    if not is_real or (like.imagined and any(t.device.type != "cpu" for t in tensors)):
        return None
    program = _copy_module(model, {}) if isinstance(model, torch.nn.Module) else model
    copies = pytree.tree_map_only(torch.Tensor, _clone, (args, kwargs))
    return dataclasses.replace(
        like, program=program, args=copies[0], kwargs=copies[1], fake_mode=None
    )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def target_device(present: set[str], device_type: str | None = None) -> str:
    """The device type whose autocast is meant for tensors on some device types."""
    known = autocast_device_types()
    if device_type is not None:
        if device_type not in known:
            raise OptionError(
                f"device_type={device_type!r} is not one that autocast knows: {', '.join(known)}"
            )
        return device_type
    found = [name for name in known if name in present]
    if found:
        return found[0]
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and "meta" in present else "cpu"


def is_usable(device_type: str) -> bool:
    """Whether there is a device of an accelerator's type."""
    module = getattr(torch, device_type, None)
    return module is not None and bool(module.is_available())


def module_tensors(model: Any) -> list[torch.Tensor]:
    """Parameters, buffers and tensors that modules have as plain attributes."""
    if not isinstance(model, torch.nn.Module):
        return []
    plain = (value for module in model.modules() for value in vars(module).values())
    return [
        *model.parameters(),
        *model.buffers(),
        *(value for value in plain if isinstance(value, torch.Tensor)),
    ]


def shared_weights(model: Any, outputs: Any) -> tuple[str, ...]:
    """Names of parameters and buffers whose memory is known elsewhere too."""
    if not isinstance(model, torch.nn.Module):
        return ()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    holders = Counter(map(storage_id, (*(tensor for _, tensor in named), *leaf_tensors(outputs))))
    return tuple(name for name, tensor in named if holders[storage_id(tensor)] > 1)


def leaf_tensors(values: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _fake(
    tensor: torch.Tensor, mode: FakeTensorMode, moved_to: str | None, target: str
) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or moved_to is not None:
        device = moved_to or (target if tensor.device.type == "meta" else tensor.device)
        with mode, torch.no_grad():
            made = _empty_like(tensor, device)
    else:
        made = mode.from_tensor(tensor, static_shapes=True)
        made = made.detach() if not made.is_leaf else made
    if isinstance(tensor, torch.nn.Parameter):
        if isinstance(made, torch.nn.Parameter):
            return made
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copy_module(model: torch.nn.Module, made: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A deep copy with some tensors replaced."""
    memo: dict[int, Any] = dict(made)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        if _is_sharded(model):
            raise ExplainError(
                f"{type(model).__name__} is sharded: explain it before fully_shard, on the meta "
                "device if it is large; the paths of weights stay the same"
            ) from error
        raise ExplainError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); explain "
            "runs a copy, so that the model itself does not change: give it a function that "
            "calls the model"
        ) from error


def _is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 has a part in a model, which then cannot be copied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())

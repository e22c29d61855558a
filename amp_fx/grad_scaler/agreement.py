"""Agreement between processes: where one of them overflowed, all skip the step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from amp_fx.errors import ScalerTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Agreement:
    """The processes that a scaler agrees with: those of a group, and those of DTensors' meshes.

    A copy agrees with the same group. One that was pickled has lost it: a group belongs to its
    process.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Agree with this group, if there is one.

        Raises:
            ScalerTypeError: this is no process group.
        """
        if process_group is not None and not _is_group(process_group):
            raise ScalerTypeError(
                "process_group must be a torch.distributed.ProcessGroup, such as "
                f"torch.distributed.group.WORLD; got {type(process_group).__name__!r}."
            )
        self.process_group = process_group

    def is_alone(self, optimizer: Any) -> bool:
        """Whether there is nobody to ask about the gradients of this optimizer."""
        if self.process_group is not None:
            return False
        return not (dist.is_available() and dist.is_initialized()) or not self._meshes(optimizer)

    def reduce_(self, found_inf: Tensor, optimizer: Any) -> None:
        """Take the largest flag of all processes; each has to call this, gradients or not.

        Args:
            found_inf: float32, 0-dim, on a device that the group's backend handles.
            optimizer: whose parameters say which meshes there are. Parameters, as every process
                has all of them while gradients may be missing.
        """
        if self.process_group is not None:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, self.process_group)
        for mesh in self._meshes(optimizer):
            for dim in range(mesh.ndim):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, mesh.get_group(dim))

    def _meshes(self, optimizer: Any) -> list[DeviceMesh]:
        """The meshes of an optimizer's parameters that do not lie within the group."""
        params = params_of(optimizer)
        if not any_dtensor(params):
            return []
        # dict.fromkeys keeps the order, which has to be the same everywhere
        meshes = dict.fromkeys(_mesh(param) for param in params if any_dtensor([param]))
        if self.process_group is None:
            return list(meshes)
        ranks = set(dist.get_process_group_ranks(self.process_group))
        return [mesh for mesh in meshes if not ranks.issuperset(mesh.mesh.flatten().tolist())]

    def __deepcopy__(self, memo: Any) -> Agreement:
        """Itself: it never changes."""
        return self

    def __reduce__(self) -> tuple[type[Agreement], tuple[()]]:
        """Nobody to agree with."""
        return Agreement, ()


def params_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors is spread over processes."""
    # Importing it takes a second, and where nobody has done so there is none. Nor is there one
    # without a process group; torch.compile imports it too.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not dist.is_initialized():
        return False
    kinds = {*map(type, tensors)} - _PLAIN
    return any(issubclass(kind, module.DTensor) for kind in kinds)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, in the same memory; any other tensor as it is."""
    return cast("Any", tensor)._local_tensor if any_dtensor([tensor]) else tensor


def clip_together_(params: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip DTensor gradients by the norm that all processes' parts have together; returns it."""
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return cast("DTensor", norm).full_tensor() if any_dtensor([norm]) else norm


def _mesh(param: Tensor) -> DeviceMesh:
    return cast("DTensor", param).device_mesh


def _is_group(value: object) -> bool:
    return dist.is_available() and isinstance(value, dist.ProcessGroup)

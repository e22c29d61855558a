"""Agreement between processes: where one of them overflowed, all skip the step."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from amp_fx.errors import ScalerTypeError
from amp_fx.grad_scaler.pipelines import pipeline_groups

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Agreement:
    """The processes that a scaler agrees with.

    Those of a group, those of DTensors' meshes, and those of pipelines. Where all gradients are
    summed over processes, as by DDP, an overflow of one arrives at all, and nobody has to agree.

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
        if not (dist.is_available() and dist.is_initialized()):
            return True
        return not self._meshes(optimizer) and not self.pipelines(optimizer)

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
        for group in self.pipelines(optimizer):
            if group is not self.process_group:
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group)

    def pipelines(self, optimizer: Any) -> list[Any]:
        """The groups of the pipelines of which an optimizer updates a stage."""
        return pipeline_groups(optimizer, params_of(optimizer))

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


def norm_together(params: list[Tensor], norm_type: float) -> Tensor:
    """The norm that the gradients of all processes have together.

    Each mesh by itself, and what is on no mesh, as `get_total_norm` takes no mixture.
    """
    grads = [param.grad for param in params if param.grad is not None]
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_mesh[_mesh(grad) if any_dtensor([grad]) else None].append(grad)
    norms = [_full(torch.nn.utils.get_total_norm(part, norm_type)) for part in by_mesh.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)


def _full(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).full_tensor() if any_dtensor([tensor]) else tensor


def _mesh(param: Tensor) -> DeviceMesh:
    return cast("DTensor", param).device_mesh


def _is_group(value: object) -> bool:
    return dist.is_available() and isinstance(value, dist.ProcessGroup)

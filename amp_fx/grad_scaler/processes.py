"""Training in several processes: where one of them overflowed, all skip the step.

Which processes have to agree follows from the scaler's process group, from the meshes of DTensor
parameters, and from the pipelines whose stages an optimizer updates. Their gradients have one norm,
and a step that is compiled updates the parts of DTensors that lie in this process.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from amp_fx.errors import ScalerTypeError
from amp_fx.grad_scaler.torch_private import runs_only_own_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def params_of(optimizer: Any) -> list[Tensor]:
    """Lists all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Returns whether one of the tensors is sharded over processes."""
    # Importing it takes a second, and where nobody has done so there is none. Nor is there one
    # without a process group; torch.compile imports it too.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not dist.is_initialized():
        return False
    kinds = {*map(type, tensors)} - _PLAIN
    return any(issubclass(kind, module.DTensor) for kind in kinds)


def local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, in the same memory; any other tensor as it is."""
    return cast("Any", tensor)._local_tensor if any_dtensor([tensor]) else tensor


class Agreement:
    """Knows the processes that a scaler agrees with.

    Those are the processes of its group, of DTensors' meshes, and of pipelines. Where all gradients
    are summed over processes, as by DDP, an overflow of one arrives at all; nobody has to agree.

    A deep copy agrees with the same group. A pickled one agrees with nobody: a group belongs to its
    process.
    """

    def __init__(self, process_group: Any = None) -> None:
        is_group = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
        if process_group is not None and not is_group:
            raise ScalerTypeError(
                "process_group must be a torch.distributed.ProcessGroup, such as "
                f"torch.distributed.group.WORLD; got {type(process_group).__name__!r}."
            )
        self.process_group = process_group

    def is_alone(self, optimizer: Any) -> bool:
        """Returns whether there is nobody to ask about the gradients of this optimizer."""
        if self.process_group is not None:
            return False
        if not (dist.is_available() and dist.is_initialized()):
            return True
        return not self._meshes(optimizer) and not pipelines(optimizer)

    def reduce_(self, found_inf: Tensor, optimizer: Any) -> None:
        """Takes the largest flag of all processes; each has to call this, gradients or not.

        Meshes are those of parameters: every process has all of them, while gradients may be
        missing. The flag is on a device that the group's backend handles.
        """
        groups = [] if self.process_group is None else [self.process_group]
        for mesh in self._meshes(optimizer):
            groups += [mesh.get_group(dim) for dim in range(mesh.ndim)]
        groups += [group for group in pipelines(optimizer) if group is not self.process_group]
        for group in groups:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group)

    def _meshes(self, optimizer: Any) -> list[DeviceMesh]:
        """Lists the meshes of an optimizer's parameters that do not lie within the group."""
        params = params_of(optimizer)
        if not any_dtensor(params):
            return []
        # dict.fromkeys keeps the order, which has to be the same everywhere
        meshes = dict.fromkeys(mesh for param in params if (mesh := _mesh(param)) is not None)
        if self.process_group is None:
            return list(meshes)
        ranks = set(dist.get_process_group_ranks(self.process_group))
        return [mesh for mesh in meshes if not ranks.issuperset(mesh.mesh.flatten().tolist())]

    def __deepcopy__(self, memo: Any) -> Agreement:
        """Returns itself: it never changes."""
        return self

    def __reduce__(self) -> tuple[type[Agreement], tuple[()]]:
        """Leaves the group out."""
        return Agreement, ()


_pipelines: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def pipelines(optimizer: Any) -> list[Any]:
    """Returns the process groups of the pipelines whose stages hold parameters of an optimizer.

    Finds them once per optimizer, by looking at all objects of the process: stages are built before
    the first step, and torch keeps no list of them.

    Relies on `_PipelineStageBase`, its `submod`, and its `group`, None for the default one.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not dist.is_initialized():
        return []
    if optimizer not in _pipelines:
        own, base = {*map(id, params_of(optimizer))}, module._PipelineStageBase
        stages = [each for each in gc.get_objects() if issubclass(type(each), base)]
        stages = [s for s in stages if not own.isdisjoint(map(id, s.submod.parameters()))]
        groups = [dist.group.WORLD if s.group is None else s.group for s in stages]
        _pipelines[optimizer] = list({id(group): group for group in groups}.values())
    return _pipelines[optimizer]


def norm_of_meshes(params: list[Tensor], norm_type: float) -> Tensor:
    """Returns the norm that the gradients of all shards have together.

    Takes it of each mesh by itself, and of what is on no mesh: `get_total_norm` takes no mixture.
    """
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for grad in [param.grad for param in params if param.grad is not None]:
        by_mesh[_mesh(grad)].append(grad)
    norms: list[Tensor] = []
    for mesh, part in by_mesh.items():
        norm: Any = torch.nn.utils.get_total_norm(part, norm_type)
        norms.append(norm if mesh is None else norm.full_tensor())
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)


def norm_of_stages(norm: Tensor, norm_type: float, optimizer: Any) -> Tensor:
    """Returns the norm of what all stages of the optimizer's pipelines have, from this stage's."""
    for group in pipelines(optimizer):
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
        dist.all_gather(norms, norm, group)
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return cast("DTensor", tensor).device_mesh if any_dtensor([tensor]) else None


_ELEMENT_BY_ELEMENT = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
"""Whose step does to a part of a parameter what it does to that part of the whole."""


def can_step_parts(optimizer: Any) -> bool:
    """Returns whether the local parts can be stepped alone, as no number depends on the others."""
    if not any_dtensor(params_of(optimizer)):
        return True
    return type(optimizer) in _ELEMENT_BY_ELEMENT and runs_only_own_code(optimizer)


@contextlib.contextmanager
def stepping_parts(optimizer: Any) -> Iterator[None]:
    """Puts local parts in the place of an optimizer's parameters, their gradients and its state.

    They share the memory of the DTensors, so that what a step writes in place is written there.
    """
    has_others = dist.is_available() and dist.is_initialized()
    params = params_of(optimizer) if has_others else []
    if not any_dtensor(params):
        yield
        return
    groups, state = optimizer.param_groups, optimizer.state
    parts = [local(param) for param in params]
    old_grads = [part.grad for part in parts]
    for param, part in zip(params, parts, strict=True):
        part.grad = None if param.grad is None else local(param.grad)
    own_state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for param, part in zip(params, parts, strict=True):
        for key, value in state.get(param, {}).items():
            own_state[part][key] = local(value) if isinstance(value, Tensor) else value
    optimizer.param_groups = [{**g, "params": [local(p) for p in g["params"]]} for g in groups]
    optimizer.state = own_state
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        for part, grad, param in zip(parts, old_grads, params, strict=True):
            if part is not param:
                part.grad = grad

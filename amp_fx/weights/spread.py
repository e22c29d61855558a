"""Finds the local parts of DTensors, and weights that a library shards.

AOTAutograd passes the local part of a DTensor, which is a plain tensor. amp_fx watches this tensor
and computes values from it.

Values of weights that a library shards are not cached, because they would take the memory that
sharding saves. FSDP also gathers a weight before its use and frees the storage with ``resize_``;
after a watched storage was resized, the next write to it raises an error. DeepSpeed's ZeRO-3
replaces the storages of parameters. ``DistributedDataParallel`` needs no special handling.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_dtensor
from amp_fx.torch_private.modules import states_of_sharded_modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def is_distributed() -> bool:
    """Returns True if the program has a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_of_plain_module(source: Any) -> bool:
    """Returns True if Dynamo read an input from a module that FSDP does not manage.

    Weights that are arguments of the program may be managed by any library.

    Relies on the predicates of ``Source.guard_source``: ``is_fsdp_module`` is true for modules of
    FSDP and FSDP2 (``_is_fsdp_managed_module``), ``is_unspecialized_nn_module`` or
    ``is_specialized_nn_module`` for other modules.
    """
    attribute = getattr(source, "guard_source", None)
    guard = attribute() if callable(attribute) else attribute
    if guard is None or guard.is_fsdp_module():
        return False
    return bool(guard.is_unspecialized_nn_module() or guard.is_specialized_nn_module())


def is_managed(weight: torch.Tensor) -> bool:
    """Returns True if a weight is sharded by FSDP2, its ``replicate``, or DeepSpeed.

    Checked at run time as well, because a graph that was compiled for the weights of one module
    may be called with those of another.
    """
    if hasattr(weight, "ds_id"):  # DeepSpeed sets it on each parameter that it partitions
        return True
    storage = weight.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in _gathered_by_fsdp2())


def _gathered_by_fsdp2() -> Iterator[torch.Tensor]:
    """Yields the unsharded parameters of all FSDP2 modules.

    Relies on ``torch.distributed._composable_state._module_state_mapping``, which contains the
    state of every module that was passed to ``fully_shard`` or ``replicate``; on
    ``_fsdp_param_groups`` of that state; and on ``_unsharded_param`` of their parameters, which the
    first all-gather sets.
    """
    if "torch.distributed.fsdp._fully_shard" not in sys.modules:
        return
    for ref in states_of_sharded_modules():
        for group in getattr(ref(), "_fsdp_param_groups", ()):
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    yield part_of(param._unsharded_param)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor without a copy; other tensors unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns ``part_of`` of each tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = module and module.DTensor
    return [t._local_tensor if type(t) is kind else t for t in tensors]  # type: ignore[attr-defined]

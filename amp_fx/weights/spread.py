"""Weights that are spread over processes (DTensor), as tensor parallelism leaves them.

What is watched, and what a copy is kept of, is a weight's part in this process, a plain tensor.
The graph takes the copy as a DTensor that lies over the processes as the weight does.

Relies on ``DTensor(local_tensor, spec, requires_grad=...)``, on its ``_local_tensor``, and on its
``_spec``, a dataclass whose ``tensor_meta`` (a named tuple) holds shape, strides and dtype.

Nothing is kept of weights that belong to a library which shards them.

FSDP gathers a weight before it is used and frees its storage behind (``resize_``). A storage that
is watched must not be resized: torch keeps half of what watching set, and the next write to it is
an error. A copy that is kept would also undo what sharding saves. DeepSpeed's ZeRO-3 puts other
storages into the same parameters. What ``DistributedDataParallel`` and its kin do to weights are
writes like any others, which are seen.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_spread
from amp_fx.weights.engine import engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def is_distributed() -> bool:
    """Whether the program has a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_of_plain_module(source: Any) -> bool:
    """Whether Dynamo read an input from a module that FSDP does not manage.

    Of weights that come as arguments nobody knows who manages them.

    Relies on ``Source.guard_source``, which both FSDPs' modules have as ``is_fsdp_module``
    (``_is_fsdp_managed_module``), other modules as ``is_unspecialized_nn_module`` or
    ``is_specialized_nn_module``.
    """
    found = getattr(source, "guard_source", None)
    guard = found() if callable(found) else found
    if guard is None or guard.is_fsdp_module():
        return False
    return bool(guard.is_unspecialized_nn_module() or guard.is_specialized_nn_module())


def is_managed(weight: torch.Tensor) -> bool:
    """Whether a weight is sharded by FSDP2, its ``replicate``, or DeepSpeed.

    A graph that was compiled for the weights of one module may be called with those of another.
    """
    if hasattr(weight, "ds_id"):  # DeepSpeed's, on each parameter that it partitions
        return True
    storage = weight.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in _gathered_by_fsdp2())


def _gathered_by_fsdp2() -> Iterator[torch.Tensor]:
    """The weights of FSDP2 as modules see them between gathering and freeing.

    Relies on ``torch.distributed._composable_state._module_state_mapping``, which holds the state
    of every module that ``fully_shard`` or ``replicate`` was called with, on that state's
    ``_fsdp_param_groups`` (one ``_fsdp_param_group`` before 2.13), and on ``_unsharded_param`` of
    their parameters, which the first gathering makes.
    """
    if "torch.distributed.fsdp._fully_shard" not in sys.modules:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for ref in list(_module_state_mapping.values()):
        state: Any = ref()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            params = () if group is None else group.fsdp_params
            yield from (
                part_of(p._unsharded_param) for p in params if hasattr(p, "_unsharded_param")
            )


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part in this process, in the same memory; any other tensor as it is."""
    return tensor._local_tensor if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``part_of`` for many."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = module and module.DTensor
    return [t._local_tensor if type(t) is kind else t for t in tensors]  # type: ignore[attr-defined]


def spec_like(weight: torch.Tensor, dtype: torch.dtype) -> Any:
    """How a DTensor of another dtype lies that lies as a weight does."""
    spec = weight._spec  # type: ignore[attr-defined]
    return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def spread_as(spec: Any, part: torch.Tensor) -> torch.Tensor:
    """The DTensor of which this is the part in this process."""
    tensor: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor(
        part, spec, requires_grad=False
    )
    return tensor


def with_parts(positions: tuple[int, ...], call: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that gets, behind its arguments, the parts of some of them."""
    if not positions:
        return call

    def call_with_parts(*args: Any) -> Any:
        parts = [part_of(args[i]) for i in positions]
        if parts[0].device.type != "cpu":  # where ops that write lists ask no storage
            for i, part in zip(positions, parts, strict=True):
                engine().stands_for(args[i], part)
        return call(*args, *parts)

    return call_with_parts


def spreading(specs: Mapping[int, Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that is given parts for some of its inputs.

    Args:
        specs: By position, how the input lies over the processes.
        compiled: Takes DTensors there.
    """
    if not specs:
        return compiled

    def call_with_spread(*inputs: Any) -> Any:
        return compiled(
            *[spread_as(specs[i], x) if i in specs else x for i, x in enumerate(inputs)]
        )

    return call_with_spread

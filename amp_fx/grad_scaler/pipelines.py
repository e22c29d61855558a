"""Pipelines: an optimizer's parameters are one stage's, and all stages skip a step together."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def pipeline_groups(optimizer: Any, params: Sequence[Tensor]) -> list[Any]:
    """The process groups of the pipelines whose stages hold parameters of an optimizer.

    Found once per optimizer, by looking at all objects of the process: stages are built before
    the first step, and torch keeps no list of them.

    Args:
        optimizer: whose they are.
        params: its parameters.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules or not dist.is_initialized():
        return []
    found = _known.get(optimizer)
    if found is None:
        found = _known[optimizer] = _find(params)
    return found


def _find(params: Sequence[Tensor]) -> list[Any]:
    """Relies on `_PipelineStageBase`, its `submod`, and its `group`, None for the default one."""
    base = sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase
    own = {id(param) for param in params}
    groups = {}
    for stage in [each for each in gc.get_objects() if issubclass(type(each), base)]:
        if any(id(param) in own for param in stage.submod.parameters()):
            group = dist.group.WORLD if stage.group is None else stage.group
            groups[id(group)] = group
    return list(groups.values())


def norm_of_all(norm: Tensor, norm_type: float, groups: Sequence[Any]) -> Tensor:
    """The norm of what all stages have together, from that of each.

    Args:
        norm: this stage's, 0-dim.
        norm_type: its order.
        groups: the groups of the pipelines.
    """
    for group in groups:
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
        dist.all_gather(norms, norm, group)
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm

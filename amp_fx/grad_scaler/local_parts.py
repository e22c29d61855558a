"""An optimizer of DTensors, for the time of a step, as one of their parts in this process."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_fx.grad_scaler.agreement import any_dtensor, local, params_of
from amp_fx.grad_scaler.torch_private import runs_only_own_code

if TYPE_CHECKING:
    from collections.abc import Iterator

_ELEMENT_BY_ELEMENT = {
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}
"""Whose step does to a part of a parameter what it does to that part of the whole."""


def can_step_parts(optimizer: Any) -> bool:
    """Whether a step may be made on the parts alone, as no number depends on the others."""
    if not any_dtensor(params_of(optimizer)):
        return True
    return type(optimizer) in _ELEMENT_BY_ELEMENT and runs_only_own_code(optimizer)


@contextlib.contextmanager
def stepping_parts(optimizer: Any) -> Iterator[None]:
    """Where an optimizer's parameters, their gradients and its state are the local parts.

    They share the memory of the DTensors, so that what a step writes in place is written there.
    """
    if not any_dtensor(params_of(optimizer)):
        yield
        return
    groups, state = optimizer.param_groups, optimizer.state
    params = params_of(optimizer)
    parts = [local(param) for param in params]
    old_grads = [part.grad for part in parts]
    for param, part in zip(params, parts, strict=True):
        part.grad = None if param.grad is None else local(param.grad)
    optimizer.param_groups = [{**g, "params": [local(p) for p in g["params"]]} for g in groups]
    optimizer.state = defaultdict(
        dict, {part: _local(state[p]) for p, part in zip(params, parts, strict=True) if p in state}
    )
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        for part, grad, param in zip(parts, old_grads, params, strict=True):
            if part is not param:
                part.grad = grad


def _local(state: dict[str, Any]) -> dict[str, Any]:
    return {k: local(v) if isinstance(v, Tensor) else v for k, v in state.items()}

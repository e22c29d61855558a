"""Prints the ops of which eager autocast gives other results once amp_fx has replaced kernels."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.testing._internal.opinfo.core import BinaryUfuncInfo
from torch.utils._pytree import tree_leaves, tree_map_only

import amp_fx
from amp_fx import Policy
from tests.parity.calls import OPS, SEED, Call, op_calls

if TYPE_CHECKING:
    from collections.abc import Iterator


def calls_of(op: Any) -> Iterator[Call]:
    """Lists calls of an op and of its aliases; of those with two inputs also with a number."""
    for call in op_calls(op, torch.bfloat16, exhaustive=False):
        yield call
        for alias in op.aliases if call.function is op.op else ():
            yield dataclasses.replace(call, name=f"{call.name}, as {alias.name}", function=alias.op)
    if not isinstance(op, BinaryUfuncInfo):
        return
    for function in (op.op, *(alias.op for alias in op.aliases)):
        for x in (torch.tensor(3.0), torch.tensor(3.0).bfloat16(), torch.tensor([3])):
            for number in (2, 2.5):
                yield Call(f"{function}, {x}, {number}", function, (x, number), {})


def results(call: Call) -> list[Any]:
    """Returns what a call gives and its gradients, or the type of what it raises."""
    torch.manual_seed(SEED)
    try:
        given = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().clone().requires_grad_(t.requires_grad),
            (call.args, call.kwargs),
        )
        with torch.autocast("cpu", torch.bfloat16):
            found = tree_leaves(call.function(*given[0], **given[1]))
        differentiable = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
        inputs = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
        if differentiable and inputs:
            ones = [torch.ones_like(t) for t in differentiable]
            found += torch.autograd.grad(differentiable, inputs, ones, allow_unused=True)
    except Exception as error:  # noqa: BLE001, eager autocast cannot make the call, before or after
        return [type(error)]
    return found


def differs(before: list[Any], after: list[Any]) -> bool:
    """Whether two results differ in a bit, a dtype, a shape, strides or the error."""
    dense = [
        [x.to_dense() for x in found if isinstance(x, torch.Tensor)] for found in (before, after)
    ]
    others = [[x for x in found if not isinstance(x, torch.Tensor)] for found in (before, after)]
    try:
        torch.testing.assert_close(*dense, rtol=0, atol=0, equal_nan=True, check_stride=True)
    except AssertionError:
        return True
    return bool(others[0] != others[1])


def main() -> None:
    """Makes the calls twice with the kernels of PyTorch, and once with those of amp_fx."""
    warnings.simplefilter("ignore")
    calls = [call for op in OPS.values() for call in calls_of(op) if call.is_reproducible]
    first = [results(call) for call in calls]
    second = [results(call) for call in calls]
    policy = Policy.default().with_modules({"no.such.module": "fp32"})
    with amp_fx.autocast("cpu", torch.bfloat16, policy=policy):
        pass
    num_compared = 0
    for call, one, two in zip(calls, first, second, strict=True):
        if differs(one, two):
            continue  # uninitialized memory, or LAPACK's bits that depend on addresses
        num_compared += 1
        if differs(one, results(call)):
            sys.stdout.write(f"differs: {call.name}\n")
    sys.stdout.write(f"compared: {num_compared} of {len(calls)}\n")


if __name__ == "__main__":
    main()

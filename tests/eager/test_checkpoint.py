"""checkpoint_policy: eager checkpoints recompute what the forward ran."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import Policy
from amp_fx.graphs.policy_mode import ambient_policy
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

POLICY = Policy.default().with_ops({"matmul": "fp32", "aten::sin": "lower_precision_fp"})
REGIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "policy": lambda: amp_fx.autocast("cpu", torch.bfloat16, policy=POLICY),
}


def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ weight).sin().square()


def compiled_program() -> Callable[..., torch.Tensor]:
    """A policy applies to compiled code only."""
    torch.compiler.reset()
    return compiled(program)


def gradients(call: Callable[..., torch.Tensor], forward: str, backward: str) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    leaves = [torch.randn(8, 8, generator=rng).requires_grad_() for _ in range(2)]
    with REGIONS[forward]():
        out = call(*leaves)
    with REGIONS[backward]():
        torch.autograd.backward(out, torch.ones_like(out))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", REGIONS)
@pytest.mark.parametrize("forward", REGIONS)
def test_recomputed_as_in_the_forward(forward: str, backward: str, reentrant: bool) -> None:
    """Compares bits with a program without checkpoints; a backward inside a region runs in it."""
    run = compiled_program() if "policy" in (forward, backward) else program
    want = gradients(run, forward, backward)
    call = functools.partial(checkpoint, run, use_reentrant=reentrant)
    got = gradients(call, forward, backward)
    assert [g.dtype for g in got] == [torch.float32] * 2
    assert all(map(torch.equal, got, want))


def test_policies_differ() -> None:
    """Checks that the policies give different results, as the test above requires."""
    run = compiled_program()
    first, second = (gradients(run, forward, "none") for forward in ("torch", "policy"))
    assert not torch.equal(first[0], second[0])


def test_the_state_is_restored_after_an_error() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("in the recomputation")
        return x.cos()

    x = torch.ones(2, requires_grad=True)
    with REGIONS["policy"]():
        out = checkpoint(broken, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="in the recomputation"):
        out.sum().backward()
    assert ambient_policy() is None

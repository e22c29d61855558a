"""Weights that are used in the bodies of higher-order ops: checkpoints and branches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from tests.weights.nets import (
    SIZE,
    assert_same,
    autocast,
    compile_amp_fx,
    gradients,
    inputs,
    twin_of,
)


class Checkpoints(nn.Module):
    """One checkpoint inside another; ``a`` is used twice, ``c`` outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(x))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(self.a(checkpoint(self.inner, x, use_reentrant=False)))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(checkpoint(self.outer, x, use_reentrant=False))
        return result


class Branches(nn.Module):
    """Two branches that share one weight; the other is used in one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, self.a, lambda v: self.b(self.a(v)), (x,))
        return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Checkpoints, Branches])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_they_are_kept_as_well(kind: type[nn.Module], is_frozen: bool) -> None:
    torch.manual_seed(0)
    net = kind().requires_grad_(not is_frozen)
    twin = twin_of(net)
    compiled = compile_amp_fx(net)
    amp_fx.weight_cache.clear()
    for number in range(6):
        x, y = inputs(requires_grad=True), inputs(requires_grad=True)
        out, expected = compiled(x), autocast(twin, y)
        assert_same(out, expected)
        if is_frozen:
            out.sum().backward()  # type: ignore[no-untyped-call]
            expected.sum().backward()  # type: ignore[no-untyped-call]
            assert_same(x.grad, y.grad)
        else:
            assert_same(gradients(out, net), gradients(expected, twin))
        for model in (net, twin) if number % 2 else ():
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
    assert amp_fx.weight_cache.stats().entries == len(list(net.parameters()))

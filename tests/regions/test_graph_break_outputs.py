"""Low outputs of a graph do not reach code of the program that is written for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.programs import compiled

bf16, f32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.middle = middle
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.middle(self, self.before(x)))
        return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def disabled(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.seen.append(x.dtype)
    return x @ net.weight


def breaks(net: Net, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    net.seen.append(x.dtype)
    return x @ net.weight


@pytest.mark.parametrize("middle", [disabled, breaks])
@torch.no_grad()  # Dynamo reads the .grad of what it resumes with
def test_a_program_that_ran_runs(middle: Any) -> None:
    torch.manual_seed(0)
    net, x = Net(middle), torch.randn(3, 4)
    expected = net(x)
    call = compiled(net, output_dtype="autocast")
    for _ in range(2):
        net.seen.clear()
        found = call(x)
        assert found.dtype == bf16
        assert net.seen == [f32]
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)

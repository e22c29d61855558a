"""blocks: what is compiled of a model, and that its numbers are autocast's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from amp_fx.errors import OptionError
from amp_fx.integrations import compile_blocks

# torch's own, where a graph starts with an activation.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

EAGER: dict[str, Any] = {"options": {"compiler": "eager"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.linear(self.norm(x)).relu()
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.body = nn.ModuleDict({"layers": self.layers})
        self.drop = nn.Dropout(0.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids))
        for block in self.layers:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def test_blocks_are_compiled_once_and_give_autocasts_numbers() -> None:
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(10, (4, 6))
    keys = [*net.state_dict()]
    with torch.autocast("cpu"):
        low = net(ids)
    full = net(ids)
    blocks = [f"layers.{i}" for i in range(3)]
    assert compile_blocks(net, **EAGER) == ["embed", "head", *blocks]
    assert compile_blocks(net, **EAGER) == []
    before = counters["stats"]["unique_graphs"]
    with torch.autocast("cpu"):
        found = net(ids)
    # The embedding, the head, and one for all blocks.
    assert counters["stats"]["unique_graphs"] - before == 3
    torch.testing.assert_close(found, low, rtol=0, atol=0)
    torch.testing.assert_close(net(ids), full, rtol=0, atol=0)
    assert [*net.state_dict()] == keys


def test_a_model_that_repeats_nothing_is_compiled_whole() -> None:
    block, x = Block(), torch.randn(2, 8)
    with torch.autocast("cpu"):
        expected = block(x).float()
    bare = {"options": {"compiler": "eager", "bare_region": True}}
    assert compile_blocks(block, **bare) == [""]
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="unknown option 'nothing'"):
        compile_blocks(Block(), options={"nothing": 1})
    with pytest.raises(OptionError, match="mode='fast'"):
        compile_blocks(Block(), mode="fast")

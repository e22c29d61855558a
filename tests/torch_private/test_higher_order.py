"""Assumptions of amp_fx about torch's implementations of higher-order ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from amp_fx.torch_private.higher_order import (
    inline_invoke_subgraph,
    inline_single_use_invoke_subgraph,
)

INVOKE = torch.ops.higher_order.invoke_subgraph


@torch.compiler.nested_compile_region
def doubled(x: Tensor) -> Any:
    return x * 2


def program(x: Tensor) -> Any:
    return doubled(doubled(x)) + doubled(x[:2].sum())


def capture() -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: object) -> Any:
        found.append(gm)
        return gm.forward

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(4))
    return found[0]


def num_calls(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=INVOKE))


def test_dynamo_inlines_bodies_with_one_call() -> None:
    assert num_calls(capture()) == 2


@pytest.mark.parametrize("inline", [inline_invoke_subgraph, inline_single_use_invoke_subgraph])
def test_bodies_are_inlined_in_place(inline: Any) -> None:
    gm = capture()
    inline(gm)
    gm.recompile()
    assert num_calls(gm) == (0 if inline is inline_invoke_subgraph else 2)
    assert torch.equal(gm(torch.ones(4))[0], torch.full((4,), 8.0))

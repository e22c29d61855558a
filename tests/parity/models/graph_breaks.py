"""Graph breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.cases import case, leaf, mlp
from tests.parity.oracle import Subject


@case()
def graph_break_in_the_middle() -> Subject:
    first, second = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y) + first(y)

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([first, second]))


@case()
def graph_break_inside_a_region() -> Subject:
    model, other = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x * 2)
            torch._dynamo.graph_break()
            z = model(y)
        return other(z.float())

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([model, other]))


@case()
def graph_break_inside_a_disabled_region() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            y = model(x)
            torch._dynamo.graph_break()
            z = model(y)
        return model(z)

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def graph_break_in_a_loop() -> Subject:
    model = mlp()

    def step(x: Tensor) -> Any:
        y = model(x)
        torch._dynamo.graph_break()
        return y.softmax(-1)

    def forward(x: Tensor) -> Any:
        for _ in range(3):
            x = step(x)
            torch._dynamo.graph_break()
        return x

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def disabled_function() -> Subject:
    model = mlp()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def opaque(x: Tensor) -> Any:
        return model(x)

    def forward(x: Tensor) -> Any:
        return model(opaque(model(x)))

    return Subject(forward, (leaf(4, 16),), module=model)

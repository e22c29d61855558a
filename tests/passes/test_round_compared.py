"""round_compared: low values that are compared with a reduction of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx.passes.round_compared import RoundCompared
from amp_fx.torch_private.inductor_passes import ROUNDED
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32

PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.dtype, int]] = {
    "largest": (lambda x: (s := x / 3) == s.amax(-1, keepdim=True), bf16, 1),
    "through views": (lambda x: (s := x / 3).view(-1) >= s.t().amax(), bf16, 1),
    "mean": (lambda x: (s := x.exp()) > s.mean(), bf16, 1),
    "float32": (lambda x: (s := x / 3) == s.amax(-1, keepdim=True), f32, 0),
    "no pointwise op": (lambda x: (s := x @ x) == s.amax(-1, keepdim=True), bf16, 0),
    "no reduction": (lambda x: x / 3 == x, bf16, 0),
    "no comparison": (lambda x: (s := x / 3) - s.amax(-1, keepdim=True), bf16, 0),
}


@pytest.mark.parametrize(("program", "dtype", "number"), PROGRAMS.values(), ids=PROGRAMS)
def test_values_that_are_rounded(
    rng: torch.Generator, program: Callable[..., Any], dtype: torch.dtype, number: int
) -> None:
    x = torch.randn(4, 4, generator=rng).to(dtype)
    gm = make_fx(program, tracing_mode="fake")(x)
    assert RoundCompared().call(gm).counts["rounded_values"] == number
    assert sum(ROUNDED in node.meta for node in gm.graph.nodes) == number


@pytest.mark.parametrize("is_training", [False, True])
def test_the_largest_score_is_found(rng: torch.Generator, is_training: bool) -> None:
    """By default, inductor compares an unrounded value with a rounded one."""
    linear, x = nn.Linear(64, 64), torch.randn(32, 64, generator=rng)

    def program(x: torch.Tensor) -> torch.Tensor:
        scores = linear(x) / 8**0.5
        return torch.where(scores == scores.amax(-1, keepdim=True), scores, 0.0)

    with torch.set_grad_enabled(is_training):
        result = compiled(program, compiler="inductor")(x)
        if is_training:
            result.sum().backward()
    assert ((result != 0).sum(-1) >= 1).all()

"""Layouts of cached weights of convolutions, and of what the convolutions return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from tests import needs

pytestmark = needs.FROZEN_GRAPHS


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.first(x)
        return y, torch.relu(self.second(y)), y.flatten(1)


def run(model: Any, x: torch.Tensor, *, is_training: bool) -> list[torch.Tensor]:
    """Returns the results and the gradients."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(is_training)
    with torch.set_grad_enabled(is_training), torch.autocast("cpu", dtype=torch.bfloat16):
        results = list(model(x))
    if not is_training:
        return results
    parameters = [x, *model.parameters()]
    loss = sum(result.float().square().sum() for result in results)
    return [*results, *torch.autograd.grad(loss, parameters)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize(
    ("is_training", "options"),
    [(False, {}), (False, {"freezing": False}), (True, {"weight_cache": "training"})],
)
def test_results_have_the_strides_of_eager_autocast(
    is_training: bool, options: dict[str, Any], is_channels_last: bool
) -> None:
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    x = torch.randn(3, 6, 9, 7).contiguous(memory_format=layout)
    model = Convolutions()
    compiled = torch.compile(model, backend="amp_fx", options=options)
    expected = run(model, x, is_training=is_training)
    found = run(compiled, x, is_training=is_training)
    assert [v for v in weight_cache.stats().values if "clone" in v.ops], "no weight was laid out"
    assert [a.stride() for a in found] == [b.stride() for b in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)

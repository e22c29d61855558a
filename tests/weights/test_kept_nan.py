"""NaN in packed graphs, whose kernels of oneDNN compute activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_fx
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = needs.FROZEN_GRAPHS

ACTIVATIONS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    torch.relu,
    functional.relu6,
    functional.hardtanh,
    lambda x: functional.hardtanh(x, -3.3, 0.1),
    lambda x: x.clamp(-2, 3),
    lambda x: functional.leaky_relu(x, 0.0),
    functional.leaky_relu,
    functional.hardsigmoid,
    functional.hardswish,
    torch.sigmoid,
    torch.tanh,
    functional.silu,
)
IMAGES = torch.randn(5, 8, 9, 9, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(500, 96, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Computes each activation behind a layer of its own."""

    def __init__(self, layer: Callable[[], nn.Module], *, is_residual: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in ACTIVATIONS])
        self.is_residual = is_residual

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(ACTIVATIONS, self.layers, strict=True)
        if self.is_residual:
            return [activation(layer(x) + layer(x.flip(0))) for activation, layer in pairs]
        return [activation(layer(x)) for activation, layer in pairs]


def with_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1], x[2] = torch.nan, -torch.nan
    x[0].view(-1)[0], x[3].view(-1)[0] = torch.inf, -torch.inf
    return x


def conv() -> nn.Module:
    return nn.Conv2d(8, 16, 3)


def transposed() -> nn.Module:
    return nn.ConvTranspose2d(8, 16, 3)


def linear() -> nn.Module:
    return nn.Linear(96, 80)


@pytest.mark.parametrize(
    ("layer", "is_residual", "dtype"),
    [
        (conv, False, torch.bfloat16),
        (conv, True, torch.bfloat16),
        (transposed, False, torch.bfloat16),
        (linear, False, torch.bfloat16),
        (conv, False, torch.float32),
    ],
)
@torch.no_grad()
def test_not_finite_numbers_are_those_of_eager_autocast(
    layer: Callable[[], nn.Module], is_residual: bool, dtype: torch.dtype
) -> None:
    model = Branches(layer, is_residual=is_residual).eval()
    x = with_nan(ROWS if layer is linear else IMAGES)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        expected = model(x)
        results = torch.compile(model, backend="amp_fx")(x)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype == dtype
        torch.testing.assert_close(result, other, rtol=2**-6, atol=2**-6, equal_nan=True)


class Blocks(nn.Module):
    """A network whose residuals are added in place, and read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, d, e = self.convs
        x = torch.relu(self.first(x))
        y = torch.relu(b(torch.relu(a(x))) + x)
        skipped = c(y)
        z = torch.relu(skipped + d(torch.relu(skipped)))
        return x, z, torch.relu(e(z) + skipped), torch.relu(e(z)).sum((2, 3))


@torch.no_grad()
def test_residuals_with_several_readers_keep_nan() -> None:
    model = Blocks().eval()
    compiled: Any = torch.compile(model, backend="amp_fx")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (IMAGES, with_nan(IMAGES)):
            for result, expected in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02, equal_nan=True)


@torch.no_grad()
def test_nan_that_is_written_into_a_weight_is_seen() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    compiled: Any = torch.compile(model, backend="amp_fx")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not compiled(IMAGES).isnan().any()
        model.get_parameter("0.weight")[3, 0, 0, 0] = torch.nan
        assert torch.equal(compiled(IMAGES).isnan(), model(IMAGES).isnan())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies a tree of outputs
@torch.no_grad()
def test_packages_keep_nan(tmp_path: Path) -> None:
    model = Branches(conv).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exported = amp_fx.export(model, (IMAGES,))
        expected = model(with_nan(IMAGES))
    path = amp_fx.package(exported, tmp_path / "model.pt2")
    results = torch._inductor.aoti_load_package(str(path))(with_nan(IMAGES))
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.isnan(), other.isnan())

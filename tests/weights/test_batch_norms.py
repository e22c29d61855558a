"""Batch norms that are folded into the weights of convolutions."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx import stats, weight_cache
from amp_fx.passes.round_biases import RoundBiases
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs.FROZEN_GRAPHS

NEAR = 2**-7
"""Two roundings to bfloat16, relative to the result."""
CONVOLUTIONS: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def filled(model: Any, seed: int = 0) -> Any:
    """Gives batch norms statistics and weights that are far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    weight_cache.clear()
    given: Any = {"dtype": torch.bfloat16, "fallback": False, **options}
    out: torch.Tensor = torch.compile(model, backend="amp_fx", options=given)(x)
    return out


@torch.no_grad()
def error(model: nn.Module, x: torch.Tensor, result: torch.Tensor) -> float:
    """Relative to float64."""
    exact = copy.deepcopy(model).double()(x.double())
    return float((result - exact).norm() / exact.norm())


def num_folded() -> int:
    """Returns the number of packed weights of convolutions that were multiplied."""
    values = weight_cache.stats().values
    return sum({"mul", "_reorder_convolution_weight"} <= {*value.ops} for value in values)


class Residual(nn.Module):
    """A convolution with its norm, to which the input is added."""

    def __init__(self, dims: int, channels: int, *, is_added: bool, is_cut: bool, **kind: Any):
        super().__init__()
        self.convolution = CONVOLUTIONS[dims - 1](channels, channels, 3, padding=1, **kind)
        self.norm = NORMS[dims - 1](channels)
        self.is_added, self.is_cut = is_added, is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.convolution(x))
        y = y + x.to(y.dtype) if self.is_added else y
        return torch.relu(y) if self.is_cut else y


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dims=st.integers(1, 3),
    channels=st.sampled_from([8, 12, 32]),
    groups=st.sampled_from([1, 4]),
    bias=st.booleans(),
    is_added=st.booleans(),
    is_cut=st.booleans(),
)
def test_a_folded_norm_is_near_float64(
    *, dims: int, channels: int, groups: int, bias: bool, is_added: bool, is_cut: bool
) -> None:
    torch.manual_seed(0)
    model = Residual(dims, channels, is_added=is_added, is_cut=is_cut, groups=groups, bias=bias)
    x = torch.randn(2, channels, *[10] * dims)
    result = run(filled(model), x)
    assert num_folded() == (dims > 1)
    assert error(model, x, result) < NEAR


@pytest.mark.slow
@torch.no_grad()
def test_a_network_is_more_accurate_with_folded_norms() -> None:
    """With statistics of data."""
    errors = {True: 0.0, False: 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        blocks = [Residual(2, 32, is_added=i % 2 == 1, is_cut=True, bias=False) for i in range(8)]
        stem = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()
        model, x = nn.Sequential(*stem, *blocks), torch.randn(8, 3, 24, 24).cumsum(-1) / 4
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = None
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, std=0.2)
        model.train()(x)
        model.eval()
        for is_folded in errors:
            result = run(model, x, fold_batch_norm=is_folded)
            errors[is_folded] += error(model, x, result)
    assert errors[True] < errors[False]


class Scaled(nn.Module):
    """A frozen norm as detection models have it: a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3)
        self.scale = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.shift + self.convolution(x) * self.scale
        return y.bfloat16().relu()


class Twice(nn.Module):
    """Uses the result of the convolution beside its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        out: torch.Tensor = torch.sigmoid(y) + self.norm(y)
        return out


class Shared(nn.Module):
    """One convolution with two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = torch.relu(norm(self.convolution(x)))
        return x


def line(kind: Any = nn.Conv2d, **norm: Any) -> Callable[[], Any]:
    return lambda: nn.Sequential(kind(8, 8, 3), nn.BatchNorm2d(8, **norm), nn.SiLU())


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "a line": (line(), 1),
    "no affine weights": (line(affine=False), 1),
    "statistics of the batch": (line(track_running_stats=False), 0),
    "transposed": (line(nn.ConvTranspose2d), 0),
    "its result is used twice": (Twice, 0),
    "two norms of one convolution": (Shared, 2),
    "arithmetic by channel": (Scaled, 1),
    "a norm without a convolution": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)),
        0,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_which_norms_are_folded(name: str) -> None:
    make, number = MODELS[name]
    torch.manual_seed(0)
    model, x = filled(make()), torch.randn(2, 8, 9, 9)
    result = run(model, x)
    assert num_folded() == number
    assert error(model, x, result) < NEAR


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"numerics": "strict"},
        {"numerics": "eager"},
        {"freezing": False},
        {"weight_cache": False},
    ],
    ids=str,
)
def test_options_without_folding(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = filled(line()()), torch.randn(2, 8, 9, 9)
    result = run(model, x, **options)
    assert num_folded() == 0
    assert error(model, x, result) < NEAR


def test_torch_without_onednn_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple silicon, where its ops do not exist."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    before = stats.snapshot()["folded_norms"]
    torch.manual_seed(0)
    model, x = filled(line()()), torch.randn(2, 8, 9, 9)
    result = run(model, x)
    assert stats.snapshot()["folded_norms"] == before
    assert error(model, x, result) < NEAR
    gm = make_fx(torch.conv2d, tracing_mode="fake")(x, torch.randn(8, 8, 3, 3), torch.randn(8))
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    RoundBiases().call(gm)


def test_a_convolution_that_is_not_packed_takes_a_rounded_bias() -> None:
    x, weight, bias = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(8)
    low = x.bfloat16(), weight.bfloat16()
    gm = make_fx(torch.conv2d, tracing_mode="fake")(*low, bias.bfloat16())
    *_, place = gm.graph.find_nodes(op="placeholder")
    place.meta["val"] = place.meta["val"].float()
    for _ in range(2):
        RoundBiases().call(gm)
    gm.recompile()
    assert torch.equal(gm(*low, bias), torch.conv2d(*low, bias.bfloat16()))
    assert sum("convert" in str(node.target) for node in gm.graph.nodes) == 1

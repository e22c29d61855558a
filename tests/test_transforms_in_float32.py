"""Transforms that raise under autocast run in float32 where the program asks for no autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.backend.cpp_compiler import has_cpp_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of transforms and of Dynamo


def jacobian(net: Any, x: Tensor) -> Any:
    return torch.func.jacrev(net.layers)(x[0])


def jacobian_of_low_input(net: Any, x: Tensor) -> Any:
    return torch.func.jacrev(net.layers)(net.linear(x)[0]), net.linear(x)


def gradients_of_samples(net: Any, x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda row: net.layers(row).square().sum()))(x)


class Net(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.program = program
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def call(program: Callable[[Any, Tensor], Any], options: dict[str, Any]) -> Any:
    compiled = torch.compile(Net(program), backend="amp_fx", options=options, fullgraph=True)
    return compiled(torch.ones(4, 8).cumsum(-1) / 8)


@pytest.mark.falls_back
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_only_the_transform_runs_in_float32(
    compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(4, 8).cumsum(-1) / 8
    found, product = call(jacobian_of_low_input, {"compiler": compiler})
    net = Net(jacobian)
    with torch.autocast("cpu", torch.bfloat16):
        expected_product = net.linear(x)
    expected = torch.func.jacrev(net.layers)(expected_product[0].float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(product, expected_product.float(), rtol=0, atol=0)
    assert [r.name for r in caplog.records].count("amp_fx.fallback") == 1
    assert "native_layer_norm_backward" in caplog.text


@pytest.mark.falls_back
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("numerics", ["default", "eager"])
def test_transforms_compile_with_inductor(numerics: str) -> None:
    found = call(jacobian, {"numerics": numerics})
    expected = jacobian(Net(jacobian), torch.ones(4, 8).cumsum(-1) / 8)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_transforms_that_autocast_accepts_stay_low(compiler: str) -> None:
    x = torch.ones(4, 8).cumsum(-1) / 8
    found = call(gradients_of_samples, {"compiler": compiler})
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients_of_samples(Net(gradients_of_samples), x)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)


def test_regions_of_the_program_raise_as_in_eager_code() -> None:
    def in_region(net: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return jacobian(net, x)

    with pytest.raises(RuntimeError, match="expected scalar type"):
        call(in_region, {"compiler": "eager"})

"""module_path: the module around an op, in eager code, after graph breaks and in opaque nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Policy
from amp_fx.errors import PolicyWarning
from amp_fx.regions.names import module_path
from tests.programs import compiled

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # Dynamo instantiates Functions
)
bf16, f32 = torch.bfloat16, torch.float32


class Product(torch.autograd.Function):
    """An opaque node: it has its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        [weight] = ctx.saved_tensors
        return grads[0].to(weight.dtype) @ weight.t() * 3, None


class Custom(nn.Module):
    """Calls the opaque function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result


class Layer(nn.Module):
    """An opaque node, a break in the graph, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()
        self.plain = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.custom(x)
        torch._dynamo.graph_break()
        return [first, self.plain(x)]


class Net(nn.Module):
    """Equal layers, which Dynamo compiles one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [out for layer in self.layers for out in layer(x)]


def dtypes(outputs: list[torch.Tensor]) -> list[torch.dtype]:
    return [out.dtype for out in outputs]


POLICIES = {
    "layers.1": [bf16, bf16, f32, f32, bf16, bf16],
    "layers.*.custom": [f32, bf16] * 3,
    "layers.2.plain": [bf16] * 5 + [f32],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pattern", POLICIES)
@torch.no_grad()  # Dynamo reads the .grad of what it resumes with
def test_equal_modules_are_told_apart(pattern: str) -> None:
    """After a graph break each is compiled alone."""
    policy = Policy.default().with_modules({pattern: "fp32"})
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 4)
    with torch.autocast("cpu"):
        expected = compiled(net, policy=policy)(x)
    assert dtypes(expected) == POLICIES[pattern]
    bare = compiled(net, policy=policy)
    around = amp_fx.compile(net, policy=policy, options={"compiler": "eager"})
    restored = [out.float() for out in expected]
    for call, outputs in ((bare, restored), (around, expected)):
        torch._dynamo.reset()
        for _ in range(2):
            torch.testing.assert_close(call(x), outputs, rtol=0, atol=0)


def test_paths_begin_at_the_compiled_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    policy = Policy.default().with_modules({"0.0": "fp32"})
    x = torch.randn(4, 4)
    fast: Any = compiled(net, policy=policy, output_dtype="autocast")
    outer = nn.Sequential(nn.Identity(), fast)
    assert outer(x).dtype == f32
    alone: Any = compiled(net[0], policy=policy, output_dtype="autocast")
    with pytest.warns(PolicyWarning, match="no module of Sequential matches '0.0'"):
        assert alone(x).dtype == bf16, "called alone it is the outermost module"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers.0.norm", "layers.0.norm"),
        ("L['model']._modules['head']", "model.head"),
        ("G['net'][0]", "net.0"),
        ("L['self']", ""),
        ("L['self'].blocks._modules['a[0]']._parameters['weight']", "blocks.a[0].weight"),
        ("L['self']._modules[\"it's\"]", "it's"),
        ("L['inner'].__closure__[0].cell_contents.0", "inner.0"),
    ],
)
def test_dynamos_names(name: str, path: str) -> None:
    assert module_path(name) == path

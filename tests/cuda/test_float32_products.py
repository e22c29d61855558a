"""Products that give float32 as CUDA's code, executed: low kernels with ``out_dtype`` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda import needs

needs.start()

import amp_fx  # noqa: E402
from amp_fx import Policy  # noqa: E402

pytestmark = [pytest.mark.usefixtures("_low_products"), pytest.mark.filterwarnings("ignore")]


class Router(nn.Module):
    """A low layer, and a router behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.gate = nn.Linear(32, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.gate(self.before(x))
        return y


def test_products_of_a_router_are_low_and_give_float32() -> None:
    found: list[str] = []

    model = Router().cuda()
    x = torch.randn(8, 32).cuda()
    options: dict[str, Any] = {"fallback": False, "post_grad_custom_post_pass": _Note(found)}
    policy = Policy.default().with_modules({"gate": "lower_precision_wide"})
    y = amp_fx.compile(model, policy=policy, options=options)(x)
    grad = torch.randn(8, 16).cuda()
    y.backward(grad)

    def low(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu().bfloat16().double()

    with torch.autocast("cuda", torch.bfloat16):
        hidden = low(model.before(x))
    torch.testing.assert_close(y.detach().cpu().double(), hidden @ low(model.gate.weight).T)
    assert y.dtype == torch.float32
    assert model.gate.weight.grad is not None
    torch.testing.assert_close(model.gate.weight.grad.cpu().double(), low(grad).T @ hidden)
    wide = [name for name in found if name.endswith(".dtype")]
    assert len(wide) == 3  # forward, and both gradients


class _Note:
    """A pass of inductor's that lists products."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.found.extend(str(n.target) for n in graph.nodes if "mm" in str(n.target))

    def uuid(self) -> None:
        return None

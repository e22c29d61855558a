"""Products that give float32 as CUDA's code, executed: low kernels with ``out_dtype`` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda import needs

needs.start()

from tests.cuda import generated  # noqa: E402

generated.start()

import amp_fx  # noqa: E402
from amp_fx import Policy, weight_cache  # noqa: E402
from amp_fx.weights.split import is_view  # noqa: E402

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


def test_a_float32_router_is_products_of_bfloat16_terms() -> None:
    """With a float32 weight and low hidden states: three products forward, six backward."""
    found: list[str] = []
    model = Router().cuda()
    x = torch.randn(8, 32).cuda()
    note = _Note(found)
    options: dict[str, Any] = {"fallback": False, "post_grad_custom_post_pass": note}
    options["weight_cache"] = "training"
    policy = Policy.default().with_modules({"gate": "bfloat16x3"})
    call = amp_fx.compile(model, policy=policy, options=options)
    y = call(x)
    grad = torch.randn(8, 16).cuda()
    y.backward(grad)
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.before(x).detach().cpu().double()
    weight, grad = model.gate.weight.detach().cpu().double(), grad.cpu().double()
    torch.testing.assert_close(y.detach().cpu().double(), hidden @ weight.T, rtol=1e-6, atol=1e-6)
    assert model.gate.weight.grad is not None
    gate_grad = model.gate.weight.grad.cpu().double()
    torch.testing.assert_close(gate_grad, grad.T @ hidden, rtol=1e-6, atol=1e-5)
    assert sum(name.endswith("mm.dtype") for name in found) == 9
    assert model.gate.weight.numel() not in note.sizes  # nothing is as large as the weight

    def of_gate() -> list[weight_cache.KeptValue]:
        return [v for v in weight_cache.stats().values if v.weights == ("gate.weight",)]

    assert sum(value.bytes for value in of_gate()) == 3 * 2 * model.gate.weight.numel()
    before = weight_cache.stats().refreshes
    for _ in range(3):
        call(x)
    assert weight_cache.stats().refreshes == before
    with torch.no_grad():
        model.gate.weight.mul_(2)
    doubled = call(x)
    assert 0 < weight_cache.stats().refreshes - before <= 3
    torch.testing.assert_close(doubled.detach().cpu(), 2 * y.detach().cpu())


class _Note:
    """A pass of inductor's that lists products, and sizes of what a forward computes."""

    def __init__(self, found: list[str]) -> None:
        self.found = found
        self.sizes: set[int] = set()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.found.extend(str(n.target) for n in graph.nodes if "mm" in str(n.target))
        if not any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")):
            computed = [n for n in graph.nodes if n.op == "call_function" and not is_view(n)]
            self.sizes.update(n.meta["val"].numel() for n in computed)

    def uuid(self) -> None:
        return None

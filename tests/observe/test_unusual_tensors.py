"""Steps with sparse and nested tensors, and with views that only seem to be leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]]


def sparse_product() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    net = nn.Linear(16, 8)
    matrix = (torch.rand(8, 8) < 0.3).float().to_sparse()

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            mixed: Tensor = torch.sparse.mm(matrix, net(x).float().t())
        return mixed.square().mean()

    return net, loss


def sparse_gradient() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    net = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True, mode="sum"), nn.Linear(16, 8))
    rows = torch.randint(0, 50, (8, 5))
    return net, lambda x: (net(rows).float() - x[:, :8]).square().mean()


def nested() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    net = nn.Linear(16, 8)

    def loss(x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:3], x[3:]])
        padded: Tensor = torch.nested.to_padded_tensor(net(rows), 0.0)
        return padded.float().square().mean()

    return net, loss


def gradient_penalty() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def loss(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = F.cross_entropy(net(x).float(), torch.arange(8))
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    return net, loss


def spectral() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    net = spectral_norm(nn.Linear(16, 8))
    return net, lambda x: net(x).float().square().mean()


UNEXAMINED = {
    sparse_product: "aten._sparse_addmm.default",
    sparse_gradient: "aten::_embedding_bag_backward",
    nested: "aten.linear.default",
    gradient_penalty: None,
    spectral: None,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("tool", [amp_fx.accuracy, amp_fx.audit])
@pytest.mark.parametrize("make", UNEXAMINED)
def test_a_step_is_examined_and_restored(make: Make, tool: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    net, loss_of = make()
    sparse = [p for p in net.parameters() if make is sparse_gradient and p.shape[0] == 50]
    dense = [p for p in net.parameters() if not any(p is each for each in sparse)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense)]
    optimizers += [torch.optim.SparseAdam(sparse)] if sparse else []
    x = torch.randn(8, 16)

    def step(x: Tensor) -> Tensor:
        for each in optimizers:
            each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(x)
        loss.backward()  # type: ignore[no-untyped-call]
        for each in optimizers:
            each.step()
        return loss

    step(x)
    before = [(p, p.grad, p.detach().clone()) for p in net.parameters()]
    report = tool(step)(x)
    for parameter, gradient, value in before:
        assert parameter.grad is gradient
        assert torch.equal(parameter, value)
    if tool is amp_fx.accuracy:
        missing = {each.op for each in report.not_examined}
        assert UNEXAMINED[make] in missing if UNEXAMINED[make] is not None else not missing

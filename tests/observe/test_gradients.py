"""Gradients and memory that a step replaces are restored, however the step reaches the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable


def clear(net: nn.Module) -> None:
    net.zero_grad()


def assign(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)


def delete(net: nn.Module) -> None:
    for parameter in net.parameters():
        del parameter.grad


def exchange(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("replace", [clear, assign, delete, exchange])
@pytest.mark.parametrize("tool", [amp_fx.accuracy, amp_fx.audit, amp_fx.record])
def test_replaced_gradients_are_restored(
    tool: Callable[..., Any], replace: Callable[[nn.Module], None], is_failing: bool
) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    net(x).sum().backward()
    before = [(p.grad, p.detach().clone()) for p in net.parameters()]
    addresses = [p.data_ptr() for p in net.parameters()]
    numbers = [gradient.clone() for gradient, _ in before if gradient is not None]

    def inner(x: torch.Tensor) -> torch.Tensor:
        replace(net)
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        net.bias.data = net.bias.data.double()
        if is_failing:
            raise ValueError("mine")
        return loss

    def step(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    if is_failing:
        with pytest.raises(ValueError, match="mine"):
            tool(step)(x)
    else:
        tool(step)(x)
    for parameter, (gradient, value) in zip(net.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(parameter, value)
    assert [p.data_ptr() for p in net.parameters()] == addresses
    after = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, after, numbers))


@pytest.mark.parametrize("has_gradients", [False, True])
def test_gradients_after_zero_grad_are_compared(has_gradients: bool) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    if has_gradients:
        net(x).sum().backward()

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert {each.name for each in amp_fx.accuracy(step)(x).gradients} == {"weight", "bias"}


@pytest.mark.parametrize("tool", [amp_fx.accuracy, amp_fx.audit, amp_fx.record])
def test_attributes_are_restored_after_calls_of_functions(tool: Callable[..., Any]) -> None:
    """The step reaches the model, the scaler and the schedule through another function."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    net, x = Counting(4, 4), torch.randn(3, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def inner(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss

    def state() -> list[Any]:
        return [net.calls, scaler.state_dict(), schedule.last_epoch, len(optimizer.state)]

    inner(x)
    before = state()
    tool(lambda x: inner(x))(x)  # noqa: PLW0108
    assert state() == before

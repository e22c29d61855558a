"""A step that computes in a second thread is refused, and its state restored."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[Callable[[], Tensor]], Tensor]

TOOLS = [amp_fx.accuracy, amp_fx.audit, amp_fx.record]


def in_a_thread(compute: Callable[[], Tensor]) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(compute()))
    thread.start()
    thread.join()
    return results[0]


def in_a_pool(compute: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute).result()


def ignoring_the_result(compute: Callable[[], Tensor]) -> Tensor:
    in_a_thread(compute)
    return torch.ones(4, requires_grad=True).sum()


@pytest.mark.parametrize("run", [in_a_thread, in_a_pool, ignoring_the_result])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_model_in_a_thread_is_refused(tool: Callable[..., Any], run: Run) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    optimizer = torch.optim.AdamW(net.parameters())

    def train() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    train()
    gradients = [parameter.grad for parameter in net.parameters()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(UnsupportedError, match="second thread"):
        tool(lambda: run(train))()
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    in_a_thread(train)  # threads work as before


@pytest.mark.parametrize("tool", TOOLS)
def test_a_thread_that_loads_data_is_allowed(tool: Callable[..., Any]) -> None:
    net = nn.Linear(4, 4)
    tool(lambda: net(in_a_thread(lambda: torch.ones(3, 4) * 2)).square().mean())()


def test_an_error_of_a_thread_is_not_hidden() -> None:
    def fail() -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        amp_fx.accuracy(lambda: in_a_pool(fail))()


def test_a_pool_that_the_step_creates_works_afterwards() -> None:
    net, pools = nn.Linear(4, 4), [ThreadPoolExecutor(1)]

    def step() -> Tensor:
        x = pools[0].submit(torch.ones, 3, 4).result()
        return net(x).square().mean()  # type: ignore[no-any-return]

    amp_fx.accuracy(step)()
    assert pools[0].submit(net, torch.ones(3, 4)).result().shape == (3, 4)
    pools[0].shutdown()

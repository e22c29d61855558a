"""The device in the host's memory: that its tensors behave as CUDA's, and its ops compute right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.cuda import needs

needs.start()

from amp_fx import csrc  # noqa: E402
from tests.cuda.device import capture_elsewhere  # noqa: E402
from tests.cuda.memory import on_cuda, on_host  # noqa: E402


def test_a_tensor_is_one_of_cuda_over_memory_of_the_hosts() -> None:
    x = torch.randn(3, 4)
    there = on_cuda(x)
    assert there.device == torch.device("cuda", 0)
    there.mul_(2)
    torch.testing.assert_close(on_host(there), x, rtol=0, atol=0)


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device="cuda")
    x.t()[2:4].fill_(1)
    x.view(-1)[0] = 5
    assert x.sum().item() == 13
    assert x._version == 2


def test_results_are_laid_out_as_cuda_makes_them() -> None:
    x = torch.randn(2, 3, 4, device="cuda", dtype=torch.float16)
    assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
    _, mean, _ = torch.native_layer_norm(x, [4], None, None, 1e-5)
    assert mean.dtype == torch.float32  # float16 on the CPU


def test_products_that_give_another_dtype_take_matrices_of_one() -> None:
    x = torch.randn(4, 4, device="cuda")
    low = x.bfloat16()
    assert torch.mm(low, low, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(RuntimeError, match="input dtypes must be the same"):
        torch.mm(low, x, out_dtype=torch.float32)


def test_autocast_casts_by_cudas_table() -> None:
    x = torch.randn(4, 4, device="cuda")
    with torch.autocast("cuda", torch.float16):
        product = x @ x
        assert product.dtype == torch.float16
        assert product.sum().dtype == torch.float32  # float16 on the CPU
        assert functional.layer_norm(product, [4]).dtype == torch.float32


def test_gradients_are_the_cpus() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    here(x).square().sum().backward()
    expected = [p.grad for p in here.parameters()]
    here.zero_grad()
    here.cuda()(x.cuda()).square().sum().backward()
    found = [p.grad.cpu() for p in here.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected)


def test_seeds_give_the_same_numbers_and_leave_the_hosts_alone() -> None:
    torch.manual_seed(3)
    torch.cuda.manual_seed(7)
    first = torch.randn(5, device="cuda"), functional.dropout(torch.ones(9, device="cuda"), 0.5)
    here = torch.randn(5)
    torch.cuda.manual_seed(7)
    again = torch.randn(5, device="cuda"), functional.dropout(torch.ones(9, device="cuda"), 0.5)
    assert all(map(torch.equal, first, again))
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5), here)


def test_writes_are_seen_as_those_of_cudas_kernels() -> None:
    """In-place ops ask the storage for a pointer; ops on lists, and reading, do not."""
    engine = csrc.load()
    weight = torch.ones(4, 4, device="cuda")
    assert engine.watch(weight)
    _ = weight + weight, weight.cpu(), weight @ weight, on_host(weight)
    torch._foreach_add_([weight], 1)
    assert engine.watched(weight)
    weight.data.add_(1)
    assert not engine.watched(weight)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "wait", [torch.Tensor.item, torch.Tensor.cpu, torch.nonzero, lambda x: x.copy_(torch.ones(()))]
)
def test_waiting_for_the_device_can_be_made_an_error(wait: Any) -> None:
    x = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.mul_(2).copy_(torch.ones(()), non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_ends_a_capture_is_an_error() -> None:
    stream = torch.accelerator.current_stream("cuda")
    event = stream.record_event()
    stream.wait_event(event)
    other: Any = torch.cuda.Event
    with capture_elsewhere():
        for ask in (event.query, other().query, lambda: torch.ones(1).pin_memory()):
            with pytest.raises(RuntimeError, match="stream is capturing"):
                ask()
    assert event.query()

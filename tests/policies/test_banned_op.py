"""binary_cross_entropy under the CUDA table: PyTorch's error, unless a policy allows it.

On fake CUDA tensors: autocast's kernels for CUDA are in every build of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from amp_fx.errors import UnsupportedError
from tests.parity.oracle import fake_cuda_region
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "aten::binary_cross_entropy"
f16, f32 = torch.float16, torch.float32


def loss(p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy(p, target)


@pytest.fixture
def args() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with FakeTensorMode():
        yield torch.empty(3, device="cuda", dtype=f16), torch.empty(3, device="cuda")


@pytest.fixture
def allowing() -> Policy:
    table = {**preset("torch").tables["cuda"], NAME: CastPolicy.FP32}
    return preset("torch").with_device("cuda", table)


@pytest.fixture
def message(args: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Returns PyTorch's error message."""
    with fake_cuda_region(f16), pytest.raises(RuntimeError, match="unsafe to autocast") as raised:
        loss(*args)
    return str(raised.value)


@pytest.mark.parametrize("fallback", [True, False])
def test_bare(args: tuple[torch.Tensor, torch.Tensor], message: str, fallback: bool) -> None:
    with pytest.raises(BackendCompilerFailed, match="unsafe to autocast") as raised:
        compiled(loss, fallback=fallback)(*args)
    assert message in str(raised.value)
    assert isinstance(raised.value.inner_exception, UnsupportedError)
    assert isinstance(raised.value, RuntimeError)  # as PyTorch's own error is


def test_ambient(args: tuple[torch.Tensor, torch.Tensor], message: str) -> None:
    """Raises PyTorch's error, because Dynamo calls its kernel before any backend."""
    with fake_cuda_region(f16), pytest.raises(RuntimeError) as raised:
        compiled(loss)(*args)
    assert all(line in str(raised.value) for line in message.splitlines())


def test_policy_allows_it_bare(args: tuple[torch.Tensor, torch.Tensor], allowing: Policy) -> None:
    call = compiled(loss, policy=allowing, output_dtype="autocast")
    assert call(args[0].float(), args[1]).dtype == f32


def test_no_policy_of_a_region_allows_it(
    args: tuple[torch.Tensor, torch.Tensor], allowing: Policy, message: str
) -> None:
    """Raises PyTorch's error, because Dynamo calls its kernel first."""
    region = amp_fx.autocast("cpu", enabled=False, policy=allowing)
    with region, fake_cuda_region(f16), pytest.raises(RuntimeError) as raised:
        compiled(loss)(*args)
    assert all(line in str(raised.value) for line in message.splitlines())

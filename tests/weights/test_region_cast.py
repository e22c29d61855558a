"""region_cast: a compiled graph's cast of a leaf is the one of the region around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.weights.kept_cast import region_cast

if TYPE_CHECKING:
    from collections.abc import Callable

functional = torch.nn.functional


def linear(weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(torch.ones(2, 4), weight)


def bias(weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(torch.ones(2, 4), torch.ones(3, 4), weight)


def conv1d(weight: torch.Tensor) -> torch.Tensor:
    return functional.conv1d(torch.ones(1, 4, 5), weight)


def conv2d(weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(torch.ones(1, 4, 5, 5), weight)


def conv3d(weight: torch.Tensor) -> torch.Tensor:
    return functional.conv3d(torch.ones(1, 4, 5, 5, 5), weight)


OPS: dict[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]] = {
    linear: (3, 4),
    bias: (3,),
    conv1d: (3, 4, 2),
    conv2d: (3, 4, 2, 2),
    conv3d: (3, 4, 2, 2, 2),
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_it_is_the_cast_that_eager_code_uses(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What it relies on: autograd saves autocast's cached cast, for weights of any rank.

    A hook on the cast sees the gradients of every use of it added up, in the low dtype.
    """
    weight = leaf(*OPS[op])
    seen: list[torch.Tensor] = []
    low = weight.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = op(weight)
        with torch._C._DisableAutocast():
            shared = region_cast(weight, low)
        shared.register_hook(seen.append)  # type: ignore[no-untyped-call]
        (out.sum() + shared.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(shared, low)
    assert len(seen) == 1
    assert weight.grad is not None
    assert torch.equal(weight.grad, seen[0].float())


def test_a_region_that_missed_a_write_is_not_asked() -> None:
    weight = leaf(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        linear(weight)
        weight.data.mul_(2)
        low = weight.detach().bfloat16()
        cast = region_cast(weight, low)
    assert torch.equal(cast, low)
    cast.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, torch.ones(3, 4))  # type: ignore[arg-type]


def test_a_region_that_holds_another_dtype_is_not_asked() -> None:
    weight = leaf(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        linear(weight)
        assert region_cast(weight, weight.detach().half()).dtype == torch.float16


def test_a_cast_made_without_gradients_is_not_taken() -> None:
    weight = leaf(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            linear(weight)
        assert region_cast(weight, weight.detach().bfloat16()).requires_grad

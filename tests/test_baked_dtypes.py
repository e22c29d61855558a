"""Python code that reads dtypes while Dynamo captures: neither overflow nor mismatch, bare.

Without a region Dynamo evaluates such code on float32, where eager autocast would show the
low dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.programs import assert_same_bits, compiled, run_program

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(call: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS[call.__name__] = call
    return call


@program
def lowest_in_masked_fill(x: torch.Tensor, w: torch.Tensor) -> Any:
    scores = x @ w
    return scores.masked_fill(scores > 0.5, torch.finfo(scores.dtype).min).softmax(-1)


@program
def lowest_in_where(x: torch.Tensor, w: torch.Tensor) -> Any:
    scores = x @ w
    return torch.where(scores > 0.5, scores, torch.finfo(scores.dtype).min).softmax(-1)


@program
def lowest_in_full(x: torch.Tensor, w: torch.Tensor) -> Any:
    scores = x @ w
    mask = torch.full((4, 4), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
    return (scores + mask).softmax(-1)


@program
def lowest_times_a_mask(x: torch.Tensor, w: torch.Tensor) -> Any:
    scores = x @ w
    mask = (1.0 - (x > -0.5).to(scores.dtype)) * torch.finfo(scores.dtype).min
    return (scores + mask).softmax(-1)


@program
def largest_in_clamp(x: torch.Tensor, w: torch.Tensor) -> Any:
    limit = torch.finfo((x @ w).dtype).max
    return (x @ w * 3e4).clamp(min=-limit, max=limit)


@program
def smallest_in_clamp(x: torch.Tensor, w: torch.Tensor) -> Any:
    scores = (x @ w).abs()
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()


@program
def zeros_then_index_add(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    out = torch.zeros((4, 4), dtype=x.dtype)
    return out.index_add_(0, torch.tensor([3, 1, 0, 1]), y.to(x.dtype))


@program
def zeros_of_the_result_then_index_add(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    out = torch.zeros((4, 4), dtype=y.dtype)
    return out.index_add_(0, torch.tensor([3, 1, 0, 1]), y)


@program
def scatter_into_zeros(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    out = torch.zeros((4, 4), dtype=y.dtype)
    return out.scatter_(1, torch.tensor([[3], [1], [0], [2]]), y[:, :1])


@program
def assignment_into_zeros(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    out = torch.zeros((4, 4), dtype=y.dtype)
    out[1:3] = y[1:3]
    return out


@program
def cast_to_another_dtype(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    return torch.baddbmm(y.to(x.dtype)[None], x[None], w[None]) + x.to(y.dtype)


@program
def branch_on_the_dtype(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    return y.clamp(max=100.0) if y.dtype == torch.float16 else y


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bare(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    args = [torch.randn(4, 4, generator=rng).requires_grad_() for _ in range(2)]
    ours = run_program(compiled(PROGRAMS[name], dtype=dtype), args)
    eager = run_program(PROGRAMS[name], args, dtype)
    for got, want in zip([*ours.outputs, *ours.grads], [*eager.outputs, *eager.grads], strict=True):
        assert got is not None
        assert want is not None
        assert torch.isfinite(got).all() == torch.isfinite(want).all()
        torch.testing.assert_close(got, want.to(got.dtype), rtol=0.05, atol=0.05)
    assert all(out.dtype == torch.float32 for out in ours.outputs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ambient_in_bits(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    args = [torch.randn(4, 4, generator=rng).requires_grad_() for _ in range(2)]
    ours = run_program(compiled(PROGRAMS[name]), args, dtype)
    assert_same_bits(ours, run_program(PROGRAMS[name], args, dtype))

"""What was repaired in Triton's interpreter, each against torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.cuda import needs

needs.start()

from tests.cuda import generated  # noqa: E402

generated.start()

from tests.cuda import kernels  # noqa: E402
from tests.cuda.memory import on_host  # noqa: E402

SIZE = 64


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def ties() -> torch.Tensor:
    """Numbers halfway between two of bfloat16, and of float16, above even and odd ones."""
    steps = torch.arange(SIZE // 2)
    return torch.cat([1 + (2 * steps + 1) / 2**8, 1 + (2 * steps + 1) / 2**11])


def extremes() -> torch.Tensor:
    """Zeros, infinities, NaN, and what the low dtypes hold as subnormals or not at all."""
    inf, nan = float("inf"), float("nan")
    some = [0.0, -0.0, inf, -inf, nan, 1e-7, -3e-8, 65520.0, 1e38, 3.4e38]
    return torch.tensor((some * SIZE)[:SIZE])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("make", [numbers, ties, extremes])
def test_casts_round_to_the_nearest_even(make: object, dtype: torch.dtype) -> None:
    x = make()  # type: ignore[operator]
    found = torch.empty(SIZE, dtype=dtype, device="cuda")
    kernels.cast[(1,)](x.cuda(), found)
    torch.testing.assert_close(found.cpu(), x.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = torch.empty(SIZE, device="cuda")
    kernels.cast[(1,)](found, back)
    torch.testing.assert_close(back.cpu(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_a_reduction_of_several_values_takes_whole_arrays() -> None:
    x = numbers()
    mean, squares = torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
    kernels.welford[(1,)](x.cuda(), mean, squares)
    torch.testing.assert_close(mean.cpu()[0], x.mean())
    torch.testing.assert_close(squares.cpu()[0] / (SIZE - 1), x.var())


def test_the_first_of_the_largest_numbers_is_found() -> None:
    x = numbers().round()
    value = torch.empty(1, device="cuda")
    index = torch.empty(1, dtype=torch.int64, device="cuda")
    kernels.largest[(1,)](x.cuda(), value, index)
    assert value.item() == x.max().item()
    assert index.item() == int((x == x.max()).nonzero()[0])


def test_a_scan_by_a_function_of_its_own() -> None:
    x = numbers()
    found = torch.empty(SIZE, device="cuda")
    kernels.log_sums[(1,)](x.cuda(), found)
    torch.testing.assert_close(found.cpu(), torch.logcumsumexp(x, 0))


def test_reductions_do_not_go_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """A combine function is called once for each halving, not once for each number."""
    from tests.cuda import interpreter

    calls = []
    combine = interpreter._combine

    def counted(*args: Any) -> Any:
        calls.append(args)
        return combine(*args)

    monkeypatch.setattr(interpreter, "_combine", counted)
    kernels.welford[(1,)](
        numbers().cuda(), torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
    )
    assert len(calls) == 6  # of 64 numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_libdevice_has_functions(dtype: torch.dtype) -> None:
    x = numbers().to(dtype)
    found = torch.empty(SIZE, dtype=dtype, device="cuda")
    kernels.tanh[(1,)](x.cuda(), found)
    torch.testing.assert_close(found.cpu(), x.tanh())


def test_kernels_write_to_the_tensors_own_memory() -> None:
    x = numbers().cuda()
    found = torch.zeros(2 * SIZE, device="cuda")
    seen = on_host(found)
    kernels.double[(1,)](x, found[SIZE:])
    torch.testing.assert_close(seen, torch.cat([torch.zeros(SIZE), 2 * x.cpu()]))


def test_kernels_get_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is written back would undo what another kernel of the wrapper wrote."""

    def refuse(_: object) -> None:
        raise AssertionError("a storage was copied")

    monkeypatch.setattr(torch.UntypedStorage, "cpu", refuse)
    found = torch.zeros(SIZE, device="cuda")
    kernels.double[(1,)](numbers().cuda(), found)
    torch.testing.assert_close(found.cpu(), 2 * numbers())


def test_threads_run_kernels_at_once() -> None:
    x = numbers().cuda()

    def run(_: int) -> torch.Tensor:
        found = torch.empty(SIZE, dtype=torch.bfloat16, device="cuda")
        kernels.cast[(1,)](x, found)
        return found.cpu()

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(200)):
            torch.testing.assert_close(found, numbers().bfloat16(), rtol=0, atol=0)

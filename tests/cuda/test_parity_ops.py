"""Op by op by CUDA's tables: amp_fx against eager ``torch.autocast("cuda")``, bit for bit.

The calls of ``tests/parity/test_ops_cpu.py`` with their tensors on CUDA, forward and backward. What
no call of can be made here stands in ``CANNOT_RUN``, with the cause.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from amp_fx.dtypes import dtype_name
from tests.cuda import needs

needs.start()

from tests.cuda.cannot_run import CANNOT_RUN  # noqa: E402
from tests.parity import oracle  # noqa: E402
from tests.parity.calls import OPS, Call, assert_alike, op_calls  # noqa: E402
from tests.parity.test_ops_cpu import ALL, QUICK, as_subject  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.parity.oracle import Subject, Way

pytestmark = pytest.mark.filterwarnings("ignore")


def on_cuda(calls: Sequence[Call]) -> Subject:
    """One program that makes all the calls, on the device."""
    subject = as_subject(calls)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cuda").requires_grad_(tensor.requires_grad)

    args = tree_map_only(torch.Tensor, move, subject.args)
    return dataclasses.replace(subject, args=args, device="cuda")


def check(calls: Sequence[Call], way: Way, dtype: torch.dtype) -> str | None:
    """How amp_fx differs from the oracle on a program of these calls; None if it does not."""
    values = all(call.is_reproducible for call in calls)
    return oracle.check(lambda: on_cuda(calls), way, dtype, values=values)


def failure(call: Call, way: Way, dtype: torch.dtype) -> str | None:
    """Why eager autocast cannot make a call; None if it can."""
    try:
        oracle.run_eager(on_cuda([call]), on_cuda([call]), way, dtype)
    except Exception as error:  # noqa: BLE001, the caller says what is to be expected
        return f"{type(error).__name__}: {error}"
    return None


def that_run(calls: Iterable[Call], way: Way, dtype: torch.dtype) -> tuple[list[Call], list[str]]:
    """The calls that eager autocast can make, some of them without a backward, and all failures."""
    found, failures = [], []
    for call in calls:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
        for tried in (call, dataclasses.replace(call, args=args, kwargs=kwargs)):
            why = failure(tried, way, dtype)
            if why is None:
                found.append(tried)
                break
            failures.append(why)
    return found, failures


def check_op(name: str, way: Way, dtype: torch.dtype, *, exhaustive: bool) -> None:
    calls, failures = that_run(op_calls(OPS[name], dtype, exhaustive=exhaustive), way, dtype)
    if name in CANNOT_RUN:
        assert not calls, "it can be run: take it out of CANNOT_RUN"
        assert any(CANNOT_RUN[name].sign in why for why in failures), failures
        pytest.skip(CANNOT_RUN[name].cause)
    assert calls, failures[:1]
    for start in range(0, len(calls), 8):
        part = calls[start : start + 8]
        assert_alike(part, functools.partial(check, way=way, dtype=dtype))


def param(name: str, way: Way, dtype: torch.dtype) -> Any:
    return pytest.param(name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}")


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [param(name, *turn) for name, turn in zip(sorted(OPS), itertools.cycle(QUICK))],
)
def test_op(name: str, way: Way, dtype: torch.dtype) -> None:
    check_op(name, way, dtype, exhaustive=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "dtype"), [param(name, *each) for name in sorted(OPS) for each in ALL]
)
def test_op_in_every_combination(name: str, way: Way, dtype: torch.dtype) -> None:
    check_op(name, way, dtype, exhaustive=False)

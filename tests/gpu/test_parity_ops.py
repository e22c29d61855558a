"""Op by op on the device: amp_fx against eager ``torch.autocast``, bit for bit.

The calls of ``tests/parity/test_ops_cpu.py`` with their tensors on the device, with and without a
region. Where eager is not deterministic, as with atomic additions, dtypes and shapes are compared.
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
from tests.cuda.cannot_run import CANNOT_RUN
from tests.gpu.place import DEVICE, IS_EMULATED, MARKS, moved
from tests.parity import oracle
from tests.parity.calls import OPS, Call, assert_alike, op_calls
from tests.parity.test_ops_cpu import ALL, QUICK, as_subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.parity.oracle import Subject, Way

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]


def as_moved_subject(calls: Sequence[Call]) -> Subject:
    subject = as_subject(calls)
    return dataclasses.replace(subject, args=moved(subject.args), device=DEVICE)


def check(calls: Sequence[Call], way: Way, dtype: torch.dtype) -> str | None:
    """Describes how amp_fx differs from the oracle on a program of calls; None if it does not."""
    values = all(call.is_reproducible for call in calls)
    return oracle.check(lambda: as_moved_subject(calls), way, dtype, values=values)


def failure(call: Call, way: Way, dtype: torch.dtype) -> str | None:
    """Returns the error of a call in eager autocast; None if it runs."""
    try:
        oracle.run_eager(as_moved_subject([call]), as_moved_subject([call]), way, dtype)
    except Exception as error:  # noqa: BLE001, the caller knows which errors it expects
        return f"{type(error).__name__}: {error}"
    return None


def that_run(
    calls: Iterable[Call], way: Way, dtype: torch.dtype, failures: list[str]
) -> Iterator[Call]:
    """Yields the calls that eager autocast can run, if need be without a backward."""
    for call in calls:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
        for tried in (call, dataclasses.replace(call, args=args, kwargs=kwargs)):
            error = failure(tried, way, dtype)
            if error is None:
                yield tried
                break
            failures.append(error)


def check_op(name: str, way: Way, dtype: torch.dtype) -> None:
    """Checks all calls on the emulated device, which must run them; else the first that runs."""
    failures: list[str] = []
    running = that_run(op_calls(OPS[name], dtype, exhaustive=False), way, dtype, failures)
    calls = list(itertools.islice(running, None if IS_EMULATED else 1))
    if IS_EMULATED and name in CANNOT_RUN:
        assert not calls, "it can be run: take it out of CANNOT_RUN"
        assert any(CANNOT_RUN[name] in error for error in failures), failures
        pytest.skip(CANNOT_RUN[name])
    if not calls and not IS_EMULATED:
        pytest.skip("eager autocast cannot run this op there")
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
    check_op(name, way, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "dtype"), [param(name, *each) for name in sorted(OPS) for each in ALL]
)
def test_op_in_every_combination(name: str, way: Way, dtype: torch.dtype) -> None:
    check_op(name, way, dtype)

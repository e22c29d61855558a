"""Op by op on the CPU: amp_fx against eager ``torch.autocast``, bit for bit.

Runs every op of ``op_db`` that eager autocast can run, forward and backward, in both low dtypes,
with and without a region: a few calls of every second op in the ``QUICK`` combinations
(``test_ops_cuda.py`` has the others), and in the slow run every sample of every op in all of them.
To save time, Dynamo captures all calls of one op as one program. If this program differs or has a
graph break, its calls run one by one, so that a failure names the call. If Dynamo alone already
differs from eager, the oracle is the captured graphs in eager autocast (see ``oracle.py``).
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
from tests.parity import exceptions, oracle
from tests.parity.calls import OPS, Call, assert_alike, op_calls, program_of
from tests.parity.oracle import LOW_DTYPES, Subject, Way

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


pytestmark = pytest.mark.filterwarnings("ignore")

CALLS_PER_PROGRAM = 8

ALL = tuple(itertools.product(Way, LOW_DTYPES))
QUICK = ((Way.AMBIENT, torch.bfloat16), (Way.BARE, torch.float16))
"""Both ways in and both dtypes; the quick run takes them in turn, op by op."""


def as_subject(calls: Sequence[Call]) -> Subject:
    """Returns one program that makes all the calls; it takes a list of their (args, kwargs)."""
    program, given = program_of(calls)
    return Subject(program, (oracle.fresh(given),))


def check(calls: Sequence[Call], way: Way, dtype: torch.dtype) -> str | None:
    """Describes how amp_fx differs from the oracle on a program of calls; None if it does not."""
    values = all(call.is_reproducible for call in calls)
    return oracle.check(lambda: as_subject(calls), way, dtype, values=values)


def as_eager_runs_it(call: Call, way: Way, dtype: torch.dtype) -> Call | None:
    """The call; without gradients where eager has no backward for it; None if it cannot run."""

    def runs(call: Call) -> bool:
        try:
            oracle.run_eager(as_subject([call]), as_subject([call]), way, dtype)
        except Exception:  # noqa: BLE001, whatever eager cannot do is not asked for
            return False
        return True

    if runs(call):
        return call
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
    call = dataclasses.replace(call, args=args, kwargs=kwargs)
    return call if runs(call) else None


def check_calls(calls: Sequence[Call], way: Way, dtype: torch.dtype) -> None:
    """Fail with the first call that differs from the oracle."""
    tried = [as_eager_runs_it(call, way, dtype) for call in calls]
    calls = [call for call in tried if call]
    if not calls:
        pytest.skip("eager autocast cannot run this op")
    assert_alike(calls, functools.partial(check, way=way, dtype=dtype))


def cases(names: Sequence[str], combinations: Iterable[tuple[Way, torch.dtype]]) -> list[Any]:
    return [
        exceptions.param(
            exceptions.CPU_OPS, name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}"
        )
        for name in names
        for way, dtype in combinations
    ]


def in_turn(names: Sequence[str]) -> list[Any]:
    """Returns one of the ``QUICK`` combinations for each op."""
    turns = zip(names, itertools.cycle(QUICK))
    return [case for name, combination in turns for case in cases([name], [combination])]


@pytest.mark.parametrize(("name", "way", "dtype"), in_turn(sorted(OPS)[::2]))
def test_op(name: str, way: Way, dtype: torch.dtype) -> None:
    check_calls(list(op_calls(OPS[name], dtype, exhaustive=False)), way, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "dtype"), cases(sorted(OPS), ALL))
def test_op_on_all_samples(name: str, way: Way, dtype: torch.dtype) -> None:
    calls = list(op_calls(OPS[name], dtype, exhaustive=True))
    for start in range(0, max(len(calls), 1), CALLS_PER_PROGRAM):
        check_calls(calls[start : start + CALLS_PER_PROGRAM], way, dtype)

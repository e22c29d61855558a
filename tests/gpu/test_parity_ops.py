"""Op by op on the device: amp_fx against eager ``torch.autocast``, bit for bit.

The calls of ``tests/parity/test_ops_cpu.py`` with their tensors on the device, with and without a
region. Where eager is not deterministic, as with atomic additions, dtypes and shapes are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from amp_fx.dtypes import dtype_name
from tests.gpu.place import DEVICE, MARKS, moved
from tests.parity import oracle
from tests.parity.calls import OPS, Call, op_calls
from tests.parity.test_ops_cpu import QUICK, as_subject

if TYPE_CHECKING:
    import torch

    from tests.parity.oracle import Subject, Way

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]


def as_moved_subject(call: Call) -> Subject:
    subject = as_subject([call])
    return dataclasses.replace(subject, args=moved(subject.args), device=DEVICE)


def runs(call: Call, way: Way, dtype: torch.dtype) -> bool:
    try:
        oracle.run_eager(as_moved_subject(call), as_moved_subject(call), way, dtype)
    except Exception:  # noqa: BLE001, whatever eager cannot do is not asked for
        return False
    return True


def combinations() -> list[Any]:
    turns = zip(sorted(OPS), itertools.cycle(QUICK))
    return [
        pytest.param(name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}")
        for name, (way, dtype) in turns
    ]


@pytest.mark.parametrize(("name", "way", "dtype"), combinations())
def test_op(name: str, way: Way, dtype: torch.dtype) -> None:
    """One call of each op: the first that eager autocast can run there."""
    calls = op_calls(OPS[name], dtype, exhaustive=False)
    call = next((call for call in calls if runs(call, way, dtype)), None)
    if call is None:
        pytest.skip("eager autocast cannot run this op there")
    values = call.is_reproducible
    found = oracle.check(lambda: as_moved_subject(call), way, dtype, values=values)
    assert found is None, f"{call.name}: {found}"

"""Whole models on the device: amp_fx against eager ``torch.autocast``, with and without a region.

With the inner compiler ``"eager"``, outputs, gradients and the state afterwards equal those of
eager autocast bit for bit, as far as eager is deterministic. With inductor, they have the dtypes of
``torch.compile`` under autocast, and errors of the same size.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.gpu.cases import cuda_cases
from tests.gpu.place import DEVICE, IS_EMULATED, MARKS
from tests.parity import exceptions, families, oracle
from tests.parity.oracle import LOW_DTYPES, Subject, Way
from tests.parity.test_models import INDUCTOR_CASES

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]

CASES = cuda_cases() if DEVICE == "cuda" else families.CASES
"""Programs whose regions name the device that they run on: eager mode ignores those of another."""


def build(name: str) -> Subject:
    """Builds a case on the device; skips cases that create tensors elsewhere."""
    torch.manual_seed(oracle.SEED)
    try:
        with torch.device(DEVICE):
            subject = CASES[name].build()
    except RuntimeError as error:  # a generator of the CPU's
        if IS_EMULATED:
            raise
        pytest.skip(f"cannot be made there: {error}")
    subject.device = DEVICE
    return subject


def skip_unless_eager_runs(name: str, way: Way, dtype: torch.dtype) -> None:
    try:
        oracle.run_eager(build(name), build(name), way, dtype)
    except Exception as error:  # whatever eager cannot do is not tested
        if IS_EMULATED and (torch.is_grad_enabled() or "does not require grad" not in str(error)):
            raise
        pytest.skip(f"eager autocast cannot run it there: {error}")


EXCEPTIONS = exceptions.MODELS if IS_EMULATED or DEVICE != "cuda" else exceptions.GPU_MODELS


def combinations(table: dict[str, str] = EXCEPTIONS) -> list[object]:
    return [
        exceptions.param(table, name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}")
        for name, case in CASES.items()
        for way, dtype in itertools.product(case.ways, LOW_DTYPES)
    ]


def check_bits(name: str, way: Way, dtype: torch.dtype) -> None:
    skip_unless_eager_runs(name, way, dtype)
    found = oracle.check(lambda: build(name), way, dtype, **CASES[name].compile_options)
    assert found is None, found


@pytest.mark.parametrize(("name", "way", "dtype"), combinations())
def test_bits_of_eager_autocast(name: str, way: Way, dtype: torch.dtype) -> None:
    check_bits(name, way, dtype)


@pytest.mark.skipif(not IS_EMULATED, reason="runs on the emulated device alone, to save time")
@pytest.mark.parametrize(("name", "way", "dtype"), combinations({}))
def test_bits_without_gradients(name: str, way: Way, dtype: torch.dtype) -> None:
    with torch.no_grad():
        check_bits(name, way, dtype)


@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_errs_no_more_than_native(name: str, way: Way) -> None:
    """Compares errors to float64 with twice those of ``torch.compile`` under autocast."""
    skip_unless_eager_runs(name, way, torch.bfloat16)
    oracle.check_inductor(lambda: build(name), way, torch.bfloat16)

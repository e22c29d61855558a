"""amp_fx.conformance: what it finds on devices with a fault, on a sound one, and on the CPU."""

from __future__ import annotations

import pytest
import torch

import amp_fx
from amp_fx.accelerators.checks import CHECKS
from amp_fx.accelerators.samples import sample_arguments
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.regions.autocast_kernels import find_op
from amp_fx.tables.presets import device_table, installed_tables
from tests.accelerators import conformance_programs, planted_faults
from tests.in_forks import failures_of

needs_device = pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def planted() -> dict[str, str]:
    return failures_of("tests.accelerators.planted_faults")


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return failures_of("tests.accelerators.conformance_programs")


@needs_device
@pytest.mark.parametrize("device", planted_faults.PROGRAMS)
def test_it_finds_planted_faults(device: str, planted: dict[str, str]) -> None:
    assert planted.get(device, "ended its process") == ""


@needs_device
@pytest.mark.parametrize("name", conformance_programs.PROGRAMS)
def test_on_the_device(name: str, programs: dict[str, str]) -> None:
    assert programs.get(name, "ended its process") == ""


def test_the_cpu_conforms(capfd: pytest.CaptureFixture[str]) -> None:
    report = amp_fx.conformance("cpu")
    assert capfd.readouterr() == ("", "")  # of deprecated ops as well
    assert report.passed, str(report)
    assert {result.check for result in report.results} == {*CHECKS} - {"other kernels"}
    assert {result.dtype for result in report.results} == {"bfloat16", "float16"}


NO_KERNEL_ON_THE_CPU = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*device_table(), *installed_tables()["cpu"]}))
def test_the_cpu_computes_finite_numbers_from_samples(name: str) -> None:
    """Runs samples on the CPU, so that an op that fails on a device alone has no kernel there."""
    op = find_op(name)
    if op is None or name in NO_KERNEL_ON_THE_CPU:
        pytest.skip("torch has no such op on the CPU")
    results = torch.utils._pytree.tree_leaves(op(*sample_arguments(op)))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    assert tensors
    assert all(tensor.isfinite().all() for tensor in tensors)

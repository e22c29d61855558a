"""The measured mixtures of dtypes: what they contain, and that they are those of this torch."""

from __future__ import annotations

import json

import pytest
import torch

from amp_fx.graphs.decomposed_kernels import CORRECTED
from amp_fx.policies.calls import qualified_name
from amp_fx.tables.mixtures import accepts, lacks_kernel, mixture_of, mixtures_file
from amp_fx.tables.presets import installed_tables, torch_version
from tests.parity.calls import OPS
from tests.tables.measure_mixtures import DTYPE, measured

_STATISTICS = ("native_layer_norm", "native_group_norm", "batch_norm")
"""Norms: their fake kernels are right about the first result only."""

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((f32, bf16), "fl"),
        ((f16, torch.int64, f32, f32), "lff"),
        ((f32, f32, torch.bool), None),
        ((f32, f64), "f?"),
        ((f32, bf16, f16), "f??"),
        ((bf16, torch.complex64), "l?"),
    ],
)
def test_mixtures_are_described_by_letters(
    dtypes: tuple[torch.dtype, ...], expected: str | None
) -> None:
    assert mixture_of(dtypes) == expected


ROWS = [
    ("aten::add.Tensor", "fl", True),
    ("aten::add.Tensor", "f?", False),
    ("aten::where.self", "lf", True),
    ("aten::copy_", "fl", True),
    ("aten::index_put_", "fl", False),
    ("aten::index_put_", "lf", False),
    ("aten::normal.Tensor_Tensor", "fl", True),
    ("aten::addr", "fll", False),
    ("aten::convolution", "llf", False),
    ("aten::native_layer_norm", "lff", False),
    ("other::op", "fl", False),
]


@pytest.mark.parametrize(("op", "mixture", "expected"), ROWS)
def test_rows_of_the_installed_torch(op: str, mixture: str, expected: bool) -> None:
    assert accepts(op, mixture, needs_all_results=True) == expected


def test_norms_accept_float32_weights_if_only_the_first_result_is_used() -> None:
    assert accepts("aten::native_layer_norm", "lff", needs_all_results=False)
    assert not accepts("aten::native_layer_norm", "fll", needs_all_results=False)


@pytest.mark.parametrize(
    ("op", "dtype", "device_type", "expected"),
    [
        ("aten::special_erfcx", bf16, "cpu", True),
        ("aten::special_erfcx", f16, "cpu", True),
        ("aten::special_erfcx", f32, "cpu", False),
        ("aten::special_erfcx", bf16, "cuda", False),
        ("aten::complex", f16, "cpu", False),
        ("aten::complex", bf16, "cpu", True),
        ("aten::add.Tensor", bf16, "cpu", False),
    ],
)
def test_kernels_that_lack_a_low_dtype(
    op: str, dtype: torch.dtype, device_type: str, expected: bool
) -> None:
    assert lacks_kernel(op, dtype, device_type) == expected


def test_a_few_ops_measure_as_in_the_file() -> None:
    """Measures a few ops of the sweep below, in two seconds."""
    findings = measured(["normal", "lerp", "maximum", "nn_functional_layer_norm", "special_ndtri"])
    committed = json.loads(mixtures_file(torch_version()).read_text(encoding="utf-8"))
    for kind, rows in findings.rows().items():
        for op, mixtures in rows.items():
            assert set(mixtures) <= set(committed[kind][op]), op


@pytest.mark.slow
def test_the_sweep_over_all_ops() -> None:
    """The file is what is measured, and what differs from its fake kernel has a version.

    Ops with a policy on the CPU get inputs of one dtype.
    """
    findings = measured(OPS)
    committed = json.loads(mixtures_file(torch_version()).read_text(encoding="utf-8"))
    assert findings.rows() == committed
    mixed = {
        op
        for op, rows in findings.differing().items()
        if any(DTYPE in how and len(set(mixture)) > 1 for mixture, how in rows.items())
    }
    without_policy = mixed - set(installed_tables()["cpu"])
    assert without_policy <= {qualified_name(op) for op in CORRECTED}

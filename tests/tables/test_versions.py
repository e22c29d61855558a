"""What changed in torch's autocast from one version to the next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_fx.errors import TorchVersionWarning
from amp_fx.policies.policy import preset
from amp_fx.tables import DEVICES
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.presets import torch_version, warn_newer_torch
from amp_fx.tables.versions import NEWEST, OLDEST, SINCE, UNTIL, VERSIONS

# How many ops the autocast of each released version has a policy for, counted in its binary;
# the ban is one of them.
COUNTS = {
    "torch-2.11": {"cpu": 129, "cuda": 125, "xpu": 123, "mps": 101, "mtia": 123, "maia": 123},
    "torch-2.12": {"cpu": 129, "cuda": 126, "xpu": 124, "mps": 101, "mtia": 124, "maia": 124},
    "torch-2.13": {"cpu": 127, "cuda": 119, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
    "torch-2.14": {"cpu": 126, "cuda": 120, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
    "torch-2.15": {"cpu": 126, "cuda": 120, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
}


@pytest.mark.parametrize("name", COUNTS)
def test_each_version_has_as_many_ops_as_its_binary(name: str) -> None:
    assert {d: len(table) for d, table in preset(name).tables.items()} == COUNTS[name]


@pytest.mark.parametrize(
    ("op", "device_type", "without", "with_it", "policy"),
    [
        ("aten::rms_norm", "cuda", "torch-2.11", "torch-2.12", CastPolicy.FP32),
        ("aten::rms_norm", "maia", "torch-2.11", "torch-2.12", CastPolicy.FP32),
        ("aten::linalg_matrix_sqrth", "cpu", "torch-2.13", "torch-2.14", CastPolicy.FP32),
        ("aten::softmax.Dimname", "mps", "torch-2.13", "torch-2.12", CastPolicy.FP32),
        ("aten::softmax.Dimname", "xpu", "torch-2.13", "torch-2.12", CastPolicy.FP32_SET_OPT_DTYPE),
        ("aten::index_copy.dimname", "cpu", "torch-2.13", "torch-2.12", CastPolicy.PROMOTE),
        ("aten::qr", "cpu", "torch-2.14", "torch-2.13", CastPolicy.FP32),
    ],
)
def test_an_op_that_came_or_went(
    op: str, device_type: str, without: str, with_it: str, policy: CastPolicy
) -> None:
    assert op not in preset(without).tables[device_type]
    assert preset(with_it).tables[device_type][op] is policy


def test_rms_norm_has_no_policy_on_cpu_and_mps_in_any_version() -> None:
    for major, minor in VERSIONS:
        tables = preset(f"torch-{major}.{minor}").tables
        assert "aten::rms_norm" not in {*tables["cpu"], *tables["mps"]}


def test_every_exception_is_about_an_op_that_some_table_lists() -> None:
    listed = {op for table in DEVICES.values() for op in table}
    assert set(SINCE) | set(UNTIL) <= listed


def test_each_supported_version_has_a_preset_and_a_count() -> None:
    assert [f"torch-{major}.{minor}" for major, minor in VERSIONS] == [*COUNTS]
    assert VERSIONS[0] == OLDEST <= torch_version() <= NEWEST == VERSIONS[-1]


def test_the_range_that_is_installed_is_the_one_that_was_tested() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text)
    assert found is not None
    numbers = [int(number) for number in found.groups()]
    assert (*numbers[:2],) == OLDEST
    assert (*numbers[2:],) == (NEWEST[0], NEWEST[1] + 1)


def test_a_newer_torch_is_warned_of() -> None:
    warn_newer_torch(NEWEST)
    with pytest.warns(TorchVersionWarning, match=r"tested on torch 2\.11 to .*; this is 3\.0"):
        warn_newer_torch((3, 0))

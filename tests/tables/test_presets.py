"""The tables of each torch version and of each preset."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_fx.errors import PolicyWarning
from amp_fx.policies.policy import preset
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.ipex import IPEX_CPU
from amp_fx.tables.presets import (
    VERSIONS,
    nearest,
    reference_table,
    torch_version,
    warn_unknown_torch,
)

# How many ops the autocast of each released version has a policy for, counted in its binary;
# the ban is one of them.
COUNTS = {
    "torch-2.13": {"cpu": 127, "cuda": 119, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
    "torch-2.14": {"cpu": 126, "cuda": 120, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
    "torch-2.15": {"cpu": 126, "cuda": 120, "xpu": 117, "mps": 95, "mtia": 117, "maia": 117},
}


@pytest.mark.parametrize("name", COUNTS)
def test_each_version_has_as_many_ops_as_its_binary(name: str) -> None:
    assert {d: len(table) for d, table in preset(name).tables.items()} == COUNTS[name]


def test_each_supported_version_has_a_preset_and_a_count() -> None:
    assert [f"torch-{major}.{minor}" for major, minor in VERSIONS] == [*COUNTS]
    assert torch_version() in VERSIONS


def test_the_oldest_torch_that_is_installed_has_a_file_and_there_is_no_newest() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    [requirement] = re.findall(r'"(torch[<>=].*)"', text)
    assert requirement == "torch>={}.{}".format(*VERSIONS[0])


IMPORT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    torch.__version__ = "3.0.0.dev20270101"
    import amp_fx
    amp_fx.Policy.default()
    amp_fx.Policy.default()
print([str(each.message) for each in caught if each.category.__name__ == "PolicyWarning"])
"""


def test_a_nightly_torch_is_warned_of_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("this is torch 3.0") == 1


def test_a_torch_without_a_file_takes_the_nearest_older_one_and_warns() -> None:
    warn_unknown_torch(VERSIONS[-1])
    assert nearest((3, 0)) == VERSIONS[-1]
    assert nearest((2, 11)) == VERSIONS[0]
    with pytest.warns(PolicyWarning, match=r"this is torch 3\.0\. It uses the op lists of torch 2"):
        warn_unknown_torch((3, 0))
    with pytest.warns(PolicyWarning, match=r"tested with torch 2\.13 to .* this is torch 2\.11"):
        warn_unknown_torch((2, 11))


def test_no_op_of_ipex_is_listed_twice() -> None:
    names = [name for text in IPEX_CPU.values() for name in text.split()]
    assert len(names) == len(set(names))


HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": CastPolicy.LOWER_PRECISION_FP,
    "AT_FORALL_FP32": CastPolicy.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": CastPolicy.FP32_SET_OPT_DTYPE,
    "AT_FORALL_PROMOTE": CastPolicy.PROMOTE,
}


def _macro(text: str, name: str) -> str:
    match = re.search(rf"#define {name}\(_\)((?:.*\\\n)+.*\n)", text)
    assert match is not None, f"{name} is not in {HEADER.name}"
    return match[1]


def _header_lists() -> dict[str, CastPolicy]:
    text = HEADER.read_text()
    table = {}
    for macro, policy in MACROS.items():
        for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", _macro(text, macro)):
            table[f"aten::{op}.{overload}" if overload else f"aten::{op}"] = policy
    appended = _macro(text, "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")
    for op in re.findall(r'"([\w.]+)"', appended):
        table[f"aten::{op}"] = CastPolicy.FP32_APPEND_DTYPE
    return table


@pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no headers")
def test_the_reference_table_is_the_lists_of_the_installed_header() -> None:
    assert reference_table() == _header_lists()

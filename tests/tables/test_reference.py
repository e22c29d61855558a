"""The reference lists against the header that the installed torch ships."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.presets import torch_version
from amp_fx.tables.reference import REFERENCE
from amp_fx.tables.versions import active

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
def test_the_reference_lists_are_those_of_the_installed_header() -> None:
    assert dict(active(REFERENCE, torch_version())) == _header_lists()

"""Entries of op tables: a qualified name and a cast policy."""

from __future__ import annotations

from typing import Any

import pytest

from amp_fx.errors import PolicyError
from amp_fx.tables.cast_policy import CastPolicy, check_entry


@pytest.mark.parametrize("name", ["softmax", "softmax.int", ""])
def test_a_name_without_namespace_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="write it like 'aten::"):
        check_entry(name, CastPolicy.FP32)


def test_a_value_that_is_no_policy_is_refused_with_those_there_are() -> None:
    policy: Any = "fp32"
    with pytest.raises(PolicyError, match=r"'fp32'; use one of .*CastPolicy\.BANNED"):
        check_entry("aten::exp", policy)

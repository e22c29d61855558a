"""Building op tables: rows merge, and an op that is listed twice is an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_fx.errors import PolicyError
from amp_fx.tables.build import build_table, ops
from amp_fx.tables.cast_policy import CastPolicy

NAMES = st.sampled_from([f"aten::op{i}" for i in range(12)] + ["aten::op0.out", "mylib::op0"])
ROWS = st.lists(st.tuples(st.sampled_from(CastPolicy), st.lists(NAMES, max_size=4)), max_size=5)


@given(ROWS)
def test_a_table_has_every_op_once_or_is_not_built(
    rows: list[tuple[CastPolicy, list[str]]],
) -> None:
    counts = Counter(name for _, names in rows for name in names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        with pytest.raises(PolicyError) as error:
            build_table(rows)
        assert any(str(error.value).startswith(f"{name} is listed") for name in twice)
        return
    table = build_table(rows)
    assert set(table) == set(counts)
    assert all(table[name] is policy for policy, names in rows for name in names)


def test_a_conflict_names_both_policies() -> None:
    rows = [(CastPolicy.FP32, ops("exp log")), (CastPolicy.PROMOTE, ops("log"))]
    with pytest.raises(PolicyError, match="aten::log is listed under fp32 and under promote"):
        build_table(rows)


@pytest.mark.parametrize("name", ["softmax", "softmax.int", ""])
def test_a_name_without_namespace_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="write it like 'aten::"):
        build_table([(CastPolicy.FP32, [name])])


def test_what_is_no_policy_is_refused_with_those_there_are() -> None:
    policy: Any = "fp32"
    with pytest.raises(PolicyError, match=r"'fp32'; allowed are .*CastPolicy\.BANNED"):
        build_table([(policy, ops("exp"))])


def test_a_table_cannot_be_changed() -> None:
    table: Any = build_table([(CastPolicy.FP32, ops("exp"))])
    with pytest.raises(TypeError):
        table["aten::log"] = CastPolicy.FP32


def test_a_family_takes_aten_unless_told() -> None:
    assert ops("exp\n conv2d.padding mylib::f") == ("aten::exp", "aten::conv2d.padding", "mylib::f")

"""Every op that torch's autocast casts has a reason, and every reason has an op."""

from __future__ import annotations

import fnmatch

import pytest

from amp_fx.tables.op_names import ops
from amp_fx.tables.presets import VERSIONS, Version, torch_tables
from amp_fx.tables.reasons import FAMILIES, Family, family_of


@pytest.mark.parametrize("version", VERSIONS)
def test_every_op_has_a_reason(version: Version) -> None:
    without = {
        (device_type, op, policy.value)
        for device_type, table in torch_tables(version).items()
        for op, policy in table.items()
        if family_of(op, policy) is None
    }
    assert not without, "add these ops to a family in amp_fx/tables/reasons.py"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.patterns)
def test_every_pattern_of_a_reason_is_needed(family: Family) -> None:
    members = {
        op
        for version in VERSIONS
        for table in torch_tables(version).values()
        for op, policy in table.items()
        if family_of(op, policy) is family
    }
    assert all(fnmatch.filter(members, pattern) for pattern in ops(family.patterns))

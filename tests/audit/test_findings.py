"""``amp_fx.audit`` finds each planted fault at its line, and nothing in the sound twins."""

from __future__ import annotations

import pytest
import torch

import amp_fx
from amp_fx.numerics.audit.report import REPAIRS
from tests.audit.programs import PLANTED, SOUND

pytestmark = pytest.mark.filterwarnings("ignore:.*CPU autocast|.*not available. Disabling")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_at_its_line(name: str) -> None:
    torch.manual_seed(0)
    kind, program = PLANTED[name]
    step, inputs, options = program()
    report = amp_fx.audit(step, **options)(*inputs)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert [finding.code.endswith("# here") for finding in found] == [True], str(report)
    [finding] = found
    assert finding.source.partition(":")[0].endswith("tests/audit/programs.py")
    assert finding.message
    assert finding.repair == REPAIRS[kind]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_twin_has_no_such_finding(name: str) -> None:
    torch.manual_seed(0)
    kind, program = SOUND[name]
    step, inputs, options = program()
    report = amp_fx.audit(step, **options)(*inputs)
    found = [finding for finding in report.findings if kind in ("all", finding.kind)]
    assert not found, str(report)


def test_each_kind_has_a_planted_fault() -> None:
    kinds = {kind for kind, _ in PLANTED.values()}
    assert kinds == set(REPAIRS) - {"reduction_low"}  # in test_collectives.py
    assert kinds <= {kind for kind, _ in SOUND.values()}

"""Pictures of a report: colours follow the measure, overflows are outlined."""

from __future__ import annotations

import json
import math
import re
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import amp_fx
from amp_fx.drawing.dot import ALARM, HEAT
from amp_fx.drawing.heat import STEPS, WORDS, levels_of
from amp_fx.errors import DrawError
from amp_fx.numerics.report import MEASURES, origins_of
from tests.numerics.faults import Bare, Rms, Scores

if TYPE_CHECKING:
    from pathlib import Path

    from amp_fx.numerics.report import AccuracyReport


def report_on(extra: torch.nn.Module) -> AccuracyReport:
    torch.manual_seed(0)
    return amp_fx.accuracy(Bare(extra), dtype="float16")(*Bare.inputs())


def test_levels_follow_the_numbers() -> None:
    report = report_on(Rms())
    for measure, key in (("effect", "effect_rms"), ("error", "accumulated")):
        levels = levels_of(report, measure)
        sound = [n for n in report.nodes if n.stage == "forward" and not n.is_overflow]
        finite = [n for n in sound if math.isfinite(getattr(n, key))]
        ranked = sorted(finite, key=lambda n: getattr(n, key))
        strengths = [levels[n.name] for n in ranked]
        assert strengths == sorted(strengths)
        assert 0 <= strengths[0] < strengths[-1] < len(HEAT)
    near = max(report_on(Scores()).nodes, key=lambda n: n.max_abs)
    assert levels_of(report_on(Scores()), "headroom")[near.name] == len(HEAT) - 1


def test_there_is_a_word_and_a_step_for_each_colour() -> None:
    assert [*STEPS] == [*WORDS] == [*MEASURES]
    assert {len(words) for words in WORDS.values()} == {len(HEAT)}
    assert {len(steps) for steps in STEPS.values()} == {len(HEAT) - 1}


@pytest.mark.parametrize("measure", ["effect", "error"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sound_program_has_no_red_op(measure: str, dtype: str) -> None:
    torch.manual_seed(0)
    report = amp_fx.accuracy(Bare(), dtype=dtype)(*Bare.inputs())
    assert not report.suspects
    assert max(levels_of(report, measure).values()) <= 2


def test_of_a_loss_that_is_nan_only_its_cause_is_red() -> None:
    report = report_on(Scores())
    assert report.loss is not None
    assert math.isnan(report.loss)
    for measure in ("effect", "error"):
        levels = levels_of(report, measure)
        red = {node.name for node in report.nodes if levels[node.name] == len(HEAT) - 1}
        assert red == origins_of(report)


def test_what_overflows_is_outlined_and_the_worst_is_red() -> None:
    report = report_on(Scores())
    drawing = amp_fx.draw(report, level="op", color="headroom")
    assert len(origins_of(report)) == 1
    outlined = [line for line in drawing.source.splitlines() if ALARM in line and "box-" in line]
    assert len(outlined) == 1
    assert "<B>bmm</B>" in outlined[0]
    assert HEAT[-1] in outlined[0]
    plain = amp_fx.draw(report, level="op", color="dtype").source
    assert HEAT[-1] not in plain
    assert "runs in float16" in plain


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs the dot program")
def test_the_page_has_a_switch(tmp_path: Path) -> None:
    report = report_on(Rms())
    amp_fx.draw(report, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["paints"] == ["effect", "error", "headroom", "dtype"]
    assert all(f'data-view="|after|op|{paint}"' in text for paint in data["paints"])


def test_colors_are_checked() -> None:
    report = report_on(Rms())
    with pytest.raises(DrawError, match="color='size' is not one of 'dtype', 'effect', 'error'"):
        amp_fx.draw(report, color="size")
    explanation = amp_fx.explain(Bare())(*Bare.inputs())
    with pytest.raises(DrawError, match=r"others require a result of amp_fx\.accuracy"):
        amp_fx.draw(explanation, color="effect")

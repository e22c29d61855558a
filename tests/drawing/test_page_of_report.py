"""The HTML page of what amp_fx.accuracy gives: its switch of colours, in a headless Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from selenium.webdriver.support.ui import Select

import amp_fx
from amp_fx.drawing.dot import ALARM, COLORS, HEAT
from amp_fx.drawing.heat import WORDS, levels_of
from tests.drawing.test_page import find, opened, press, pytestmark  # noqa: F401
from tests.numerics.faults import Broken, TinyGPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.numerics.report import AccuracyReport


@pytest.fixture(scope="module")
def report() -> AccuracyReport:
    torch.manual_seed(0)
    return amp_fx.accuracy(Broken(), dtype="float16", scale=1024.0)(*TinyGPT.inputs())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, report: AccuracyReport) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    amp_fx.draw(report, path)
    with opened(path, tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def paint(browser: Any, name: str) -> None:
    [switch] = find(browser, "#paint")
    Select(switch).select_by_value(name)


def fills(browser: Any) -> dict[str, set[str]]:
    """By its title, the colours of each box in the picture."""
    script = """
        return [...document.querySelectorAll("#picture .node")].map(box => [
            box.querySelector("text").textContent.trim(),
            [...box.querySelectorAll("polygon, path")].map(shape => shape.getAttribute("fill"))])
    """
    return {title: {*found} - {"none"} for title, found in browser.execute_script(script)}


def legend(browser: Any) -> str:
    [svg] = find(browser, "#picture svg")
    text: str = svg.text
    return text


def test_boxes_have_the_colour_of_the_measure_chosen(browser: Any, report: AccuracyReport) -> None:
    press(browser, level="module")
    for measure in ("error", "headroom", "effect"):
        paint(browser, measure)
        levels = levels_of(report, measure)
        inside = [n for n in report.nodes if n.stage == "forward" and n.module == "loss"]
        worst = max(levels[node.name] for node in inside)
        assert fills(browser)["loss"] == {HEAT[worst]}
        assert WORDS[measure][-1] in legend(browser)
    assert fills(browser)["norm"] == {HEAT[0]}


def test_the_switch_has_dtypes_too_in_stripes_where_there_are_several(browser: Any) -> None:
    press(browser, level="module")
    paint(browser, "dtype")
    assert fills(browser)["loss"] == {COLORS["float16"]}
    assert fills(browser)["1"] == {COLORS["float16"], COLORS["float32"]}
    assert "runs in float16" in legend(browser)
    press(browser, level="op")
    assert "runs in float16" in legend(browser), "the switch holds for all views"


def test_switching_leaves_the_picture_where_it_is(browser: Any) -> None:
    press(browser, level="module")
    [zoom] = find(browser, "#in")
    zoom.click()
    places = []
    for name in ("effect", "dtype"):
        paint(browser, name)
        [box] = [e for e in find(browser, "#picture .node") if e.text.startswith("head")]
        places.append((box.rect["x"], box.rect["y"], box.rect["width"]))
    assert places[0] == pytest.approx(places[1], abs=4)


def test_what_overflows_is_outlined_and_suspects_are_told(
    browser: Any, report: AccuracyReport
) -> None:
    paint(browser, "effect")
    script = "return document.querySelectorAll('#picture .node [stroke=\"" + ALARM + "\"]').length"
    assert browser.execute_script(script) == 2
    [details] = find(browser, "#details")
    assert details.text.startswith(f"1. {report.suspects[0]}")
    [header] = find(browser, "header")
    assert f"{len(report.suspects)} suspects" in header.text
    assert "casts" not in header.text
    assert "before" not in header.text
    rows = [row.text for row in find(browser, "tbody tr")]
    assert sum("overflow" in row for row in rows) == 3


def test_the_columns_of_the_table_are_explained(browser: Any) -> None:
    [columns] = find(browser, "#columns")
    names = [header.text for header in find(browser, "thead th")]
    assert {"runs in", "measured"} <= {*names}
    assert all(name in columns.text for name in ("runs in", "measured", "error", "effect"))


def test_it_has_no_errors(browser: Any) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

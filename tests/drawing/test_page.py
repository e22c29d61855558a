"""The HTML page, in a headless Chromium without a network."""

from __future__ import annotations

import contextlib
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from tests.models.explained import gpt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

selenium = pytest.importorskip("selenium.webdriver")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver"),
    pytest.mark.skipif(shutil.which("dot") is None, reason="needs the dot program"),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1280,800",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    path = tmp_path_factory.mktemp("page") / "graph.html"
    explanation = amp_fx.explain(gpt(3), options={"weight_cache": "training"})(tokens, tokens)
    amp_fx.draw(explanation, path)
    return path


@contextlib.contextmanager
def opened(page: Path, profile: Path) -> Iterator[Any]:
    """A browser with a page."""
    options = selenium.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    driver.get(page.as_uri())
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Iterator[Any]:
    with opened(page, tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def find(browser: Any, selector: str) -> list[Any]:
    found: list[Any] = browser.find_elements("css selector", selector)
    return found


def shown_rows(browser: Any) -> list[str]:
    rows: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('tbody tr:not([hidden])')].map(r => r.innerText)"
    )
    return rows


def click(browser: Any, selector: str, text: str) -> None:
    """Clicks what has a text, wherever it is scrolled to."""
    [found] = [e for e in find(browser, selector) if e.get_attribute("textContent") == text]
    event = "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    browser.execute_script(event, found)


def press(browser: Any, **data: str) -> None:
    [(name, value)] = data.items()
    [button] = find(browser, f'[data-{name}="{value}"]')
    button.click()


def test_it_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = set(re.findall(r"""(?:src|href)=["']([^"']+)""", text))
    assert {link for link in links if not link.startswith("#")} == set()
    assert set(re.findall(r"https?://[^\s\"'<>\\]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_it_loads_without_an_error_and_fits(browser: Any) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) == 0
    [svg] = find(browser, "#picture svg")
    [room] = find(browser, "#picture")
    assert svg.rect["width"] <= room.rect["width"] + 1
    assert svg.rect["x"] >= room.rect["x"]


def test_fit_shows_all_of_it(browser: Any) -> None:
    press(browser, level="op")
    [button] = find(browser, "#fit")
    button.click()
    [svg], [room] = find(browser, "#picture svg"), find(browser, "#picture")
    assert svg.rect["height"] <= room.rect["height"] + 1
    assert svg.rect["width"] <= room.rect["width"] + 1
    press(browser, level="module")


def test_a_narrow_window_keeps_the_picture(browser: Any) -> None:
    before = browser.get_window_size()
    browser.set_window_size(420, 800)
    try:
        [room], [table] = find(browser, "#picture"), find(browser, "#rows")
        assert room.rect["width"] >= 300
        assert room.rect["height"] >= 150
        assert table.rect["y"] >= room.rect["y"] + room.rect["height"]
    finally:
        browser.set_window_size(before["width"], before["height"])


def test_search_by_op_and_by_module(browser: Any) -> None:
    [search] = find(browser, "#search")
    search.send_keys("layer_norm")
    assert {row.split("\t")[0] for row in shown_rows(browser)} == {"layer_norm"}
    assert len(shown_rows(browser)) == 7  # two in each block, one behind
    assert len(find(browser, "#picture .node.hit")) == 3  # blocks are folded into one
    search.clear()
    search.send_keys("blocks.1.mlp")
    assert {row.split("\t")[1].rsplit(".", 1)[0] for row in shown_rows(browser)} == {"blocks.1.mlp"}
    search.send_keys("\ue007")  # enter: goes to the first box that fits
    assert len(find(browser, "#picture .node.chosen")) == 1
    search.clear()
    search.send_keys(" ")
    assert not find(browser, "#picture .node.hit")


def test_a_click_tells_the_reasons(browser: Any) -> None:
    press(browser, level="op")
    click(browser, "#picture .node text", "scaled_dot_product_attention")
    [details] = find(browser, "#details")
    assert "lower_precision_fp (cpu table)" in details.text
    assert "floating-point inputs go to bfloat16" in details.text
    assert "models.py:" in details.text
    assert len(find(browser, "tr.chosen")) == 3  # the box stands for three blocks


def test_what_an_arrow_says_is_no_box(browser: Any) -> None:
    press(browser, level="op")
    click(browser, "#picture .node text", "scaled_dot_product_attention")
    [details] = find(browser, "#details")
    before = details.text
    label = find(browser, "#picture .node:not([id^=box]) text")[-1]
    assert re.match(r"\w+ \[", label.get_attribute("textContent"))
    event = "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    browser.execute_script(event, label)
    assert details.text == before
    assert len(find(browser, "#picture .node.chosen")) == 1


def test_a_row_chooses_its_box(browser: Any) -> None:
    press(browser, level="module")
    click(browser, "tbody td", "embedding")
    [chosen] = find(browser, "#picture .node.chosen")
    assert "token" in chosen.get_attribute("textContent")


def test_before_and_after(browser: Any) -> None:
    press(browser, side="before")
    assert not [row for row in shown_rows(browser) if row.startswith(("cast", "kept"))]
    assert not [
        t for t in find(browser, "#picture text") if "bf16" in t.get_attribute("textContent")
    ]
    press(browser, side="after")
    assert [row for row in shown_rows(browser) if row.startswith("cast")]
    assert [t for t in find(browser, "#picture text") if "bf16" in t.get_attribute("textContent")]


def test_it_zooms_and_pans(browser: Any) -> None:
    def width() -> float:
        [svg] = find(browser, "#picture svg")
        result: float = svg.rect["width"]
        return result

    find(browser, "#fit")[0].click()
    before = width()
    find(browser, "#in")[0].click()
    assert width() == pytest.approx(before * 1.25, rel=0.01)
    find(browser, "#fit")[0].click()
    assert width() == pytest.approx(before, rel=0.01)
    [svg] = find(browser, "#picture svg")
    left = svg.rect["x"]
    [picture] = find(browser, "#picture")
    actions = selenium.ActionChains(browser)
    actions.move_to_element(picture).click_and_hold().move_by_offset(60, 0).release().perform()
    assert svg.rect["x"] == pytest.approx(left + 60, abs=4)

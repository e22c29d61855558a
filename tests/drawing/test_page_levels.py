"""The HTML page that opens modules by clicks, drawn by the browser where there is no ``dot``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from selenium.webdriver.support.wait import WebDriverWait

import amp_fx
from tests.drawing import test_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (test_page.BROWSER and test_page.DRIVER), reason="needs chromium and chromium-driver"
)


def opened_boxes(browser: Any) -> list[str]:
    return [e.get_attribute("textContent") for e in test_page.find(browser, ".node.opens")]


def open_module(browser: Any, words: str) -> None:
    boxes = test_page.find(browser, ".node.opens")
    [box] = [e for e in boxes if e.get_attribute("textContent").split()[0] == words]
    event = "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    browser.execute_script(event, box)


def titles(browser: Any) -> str:
    return " ".join(e.get_attribute("textContent") for e in test_page.find(browser, ".node text"))


LEAST_ROOM = """
return Math.min(...[...document.querySelectorAll('#picture .node[id^=box]')].flatMap((node) => {
  const shapes = [...node.querySelectorAll('polygon, path, ellipse')].map((e) => e.getBBox());
  const left = Math.min(...shapes.map((box) => box.x));
  const right = Math.max(...shapes.map((box) => box.x + box.width));
  return [...node.querySelectorAll('text')].map((e) => e.getBBox())
    .map((box) => Math.min(box.x - left, right - box.x - box.width));
}))
"""
"""How far the words of boxes stay away from the sides, at the least."""

SMALLEST_WORD = """
return Math.min(...[...document.querySelectorAll('#picture .node[id^=box] text')]
  .map((e) => e.getBoundingClientRect().height))
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_dot", [False, True])
def test_clicks_unfold_a_model_down_to_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_dot: bool
) -> None:
    if has_dot and shutil.which("dot") is None:
        pytest.skip("needs the dot program")
    sizes: dict[str, Any] = {"n_layer": 12, "n_head": 2, "n_embd": 16, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, vocab_size=32, bos_token_id=0, eos_token_id=0)
    model: Any = transformers.GPT2LMHeadModel(config)
    model.eval()
    options = {"weight_cache": "training"}
    explanation = amp_fx.explain(model, options=options)(torch.arange(8)[None])
    with monkeypatch.context() as patched:
        if not has_dot:
            patched.setenv("PATH", str(tmp_path))  # no dot there
        amp_fx.draw(explanation, tmp_path / "gpt2.html")
    with test_page.opened(tmp_path / "gpt2.html", tmp_path / "profile") as browser:
        WebDriverWait(browser, 60).until(lambda b: test_page.find(b, "#picture svg"))
        assert browser.execute_script(LEAST_ROOM) >= 3
        assert browser.execute_script(SMALLEST_WORD) >= 8  # pixels
        browser.set_window_size(400, 800)
        [svg], [room] = (test_page.find(browser, f"#picture{e}") for e in (" svg", ""))
        assert svg.rect["width"] <= room.rect["width"]
        assert browser.execute_script(SMALLEST_WORD) >= 5
        browser.set_window_size(1280, 800)
        test_page.press(browser, level="model")
        assert [text.split()[0] for text in opened_boxes(browser)] == ["transformer"]
        open_module(browser, "transformer")
        assert [text.split()[:2] for text in opened_boxes(browser)] == [["h.0-11", "x12"]]
        open_module(browser, "h.0-11")
        assert [text.split()[0] for text in opened_boxes(browser)] == ["attn", "mlp"]
        open_module(browser, "mlp")
        assert "addmm" in titles(browser)
        path = [e.text.split()[-1] for e in test_page.find(browser, "#path button")]
        assert path == ["model", "transformer", "transformer.h.0", "transformer.h.0.mlp"]
        test_page.find(browser, "#path button")[0].click()
        assert [text.split()[0] for text in opened_boxes(browser)] == ["transformer"]
        severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert severe == []

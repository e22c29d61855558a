"""The demo: every contender learns, the table says what happened, bad arguments give one line."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
import torch
from rich.console import Console

import amp_fx
from amp_fx.commands import demo
from amp_fx.commands.cli import main
from amp_fx.demo import train
from amp_fx.demo.generate import TEXTS, Texts, Writing, generate
from amp_fx.demo.models import GPT, Size
from amp_fx.demo.train import (
    DemoSettings,
    TrainingComparison,
    TrainingRun,
    Vocabulary,
    initialize,
    random_batch,
    statements,
)
from tests.bench.lean import corpus

TINY = DemoSettings(
    steps=20,
    size=Size(width=16, depth=1, heads=2, context=16),
    batch=8,
    learning_rate=0.02,
    compiler="aot_eager",
)


@pytest.fixture(scope="module")
def console() -> Console:
    """Keeps what is printed; as wide as a terminal usually is."""
    return Console(file=io.StringIO(), width=80, record=True)


@pytest.fixture(scope="module")
def comparison(console: Console) -> TrainingComparison:
    torch._dynamo.reset()
    return demo.train(TINY, console)


@pytest.fixture(scope="module")
def texts(comparison: TrainingComparison, console: Console) -> Texts:
    settings = dataclasses.replace(TINY, compiler="eager")  # which gives eager autocast's bits
    return demo.write(comparison, settings, console)


def test_every_contender_learns(comparison: TrainingComparison) -> None:
    for run in comparison.runs:
        assert len(run.losses) == len(run.times) == 20
        assert all(map(math.isfinite, run.losses))
        assert run.final_loss < run.losses[0] - 0.5


def test_contenders_start_alike_and_stay_close(comparison: TrainingComparison) -> None:
    """Same weights and batches: bfloat16 rounds to 8 bits, so that losses agree to about 1 %."""
    for low in (comparison.amp_fx, comparison.autocast):
        torch.testing.assert_close(low.losses, comparison.float32.losses, rtol=0.02, atol=0)
        assert low.losses != comparison.float32.losses


def test_float16_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our scaler where amp_fx trains, by torch's where users do today; both learn."""
    scales: dict[type, list[float]] = {amp_fx.GradScaler: [], torch.amp.GradScaler: []}
    step = train.Trainer.step

    def spy(trainer: train.Trainer, *arguments: Any) -> None:
        step(trainer, *arguments)
        scales[type(trainer.scaler)].append(trainer.scaler.get_scale())

    monkeypatch.setattr(train.Trainer, "step", spy)
    settings = dataclasses.replace(TINY, dtype=torch.float16, compiler="eager")
    result = demo.train(settings, Console(file=io.StringIO()))
    assert [run.final_loss < run.losses[0] - 0.5 for run in result.runs] == [True] * 3
    assert sorted(scales[amp_fx.GradScaler]) == [1.0] * 20 + [2.0**16] * 20  # 1.0: float32
    assert scales[torch.amp.GradScaler] == [2.0**16] * 20


def test_table_holds_what_was_measured(comparison: TrainingComparison, console: Console) -> None:
    console.print(demo.results(comparison))
    rows = [line.split("│") for line in console.export_text(clear=False).splitlines()]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:5]] for row in rows if len(row) == 6}
    runs, casts = comparison.runs, comparison.casts
    assert cells["loss, first step"] == [f"{run.losses[0]:.3f}" for run in runs]
    assert cells["time per step, median"] == [f"{run.step * 1e3:.1f} ms" for run in runs]
    assert cells["... relative to float32"][0] == "1.00"
    assert cells["... relative to torch.autocast"][2] == "1.00"
    assert cells["casts inserted"] == ["-", str(casts["casts_inserted"]), "-"]


def test_contenders_write_what_the_whole_model_says() -> None:
    """Without a cache: each token is the likeliest after all before it."""
    torch.manual_seed(0)
    model = GPT(64, TINY.size)
    for weight in model.parameters():  # so that what is likeliest depends on the whole context
        torch.nn.init.normal_(weight)
    texts = generate(model, [1, 2, 3], dataclasses.replace(TINY, compiler="eager"))
    assert texts.float32.tokens == continued(model, texts.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert texts.autocast.tokens == continued(model, texts.autocast)
    assert texts.amp_fx.tokens == texts.autocast.tokens
    assert len(set(texts.amp_fx.tokens)) > 5


@torch.no_grad()
def continued(model: GPT, text: Writing) -> list[int]:
    """The prompt, and what the model takes for the next token at each place of a text."""
    likeliest: list[int] = model(torch.tensor([text.tokens])).argmax(-1)[0].tolist()
    return text.tokens[:3] + likeliest[2:-1]


def test_one_graph_without_breaks_for_each_contender() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT(8, TINY.size)
    initialize(model)
    generate(model, [1, 2], TINY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]


def test_texts_beside_each_other(
    comparison: TrainingComparison, texts: Texts, console: Console
) -> None:
    console.print(demo.written(comparison, texts))
    printed = console.export_text(clear=False)
    rows = [line.split("│") for line in printed.splitlines()]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:5]] for row in rows if len(row) == 6}
    rates = [f"{1 / text.step:.0f}" for text in texts.writings]
    assert cells["tokens per second, median"] == rates
    assert cells["... as in torch.autocast"][1:] == ["16 of 16", "16 of 16"]
    words = comparison.vocabulary.decode(texts.amp_fx.tokens).split()
    assert " ".join(words) in " ".join(printed.split())
    assert all(len(text.times) == TEXTS * 15 for text in texts.writings)


def test_the_last_line_says_what_is_gained(
    comparison: TrainingComparison, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the medians of this run; the tables come before it, the text first."""
    times = {"float32": 4.0, "amp_fx": 2.0, "torch.autocast": 5.0}
    for each in (*texts.writings, *comparison.runs):
        monkeypatch.setattr(each, "times", [9.0, times[each.name], times[each.name]])
    shown = Console(file=io.StringIO(), width=80, record=True)
    monkeypatch.setattr(demo, "Console", lambda: shown)
    monkeypatch.setattr(demo, "train", lambda *_: comparison)
    monkeypatch.setattr(demo, "write", lambda *_: texts)
    assert main(["demo", "--compiler", "eager"]) == 0
    words = " ".join(shown.export_text().split())
    assert words.index("token by token") < words.index("time per step")
    assert words.endswith(
        "amp_fx writes 2.5 times as many tokens per second as torch.autocast and 2.0 times as many "
        "as float32; its training step takes 0.40 of torch.autocast's time."
    )


def test_tokens_are_words_of_the_text() -> None:
    text = statements()
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens.tolist()) == text
    assert len(tokens) > TINY.size.context
    assert '"while"' in text
    assert "***" not in text


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--steps", "1"), "at least 2"),
        (("--steps", "0"), "at least 2"),
        (("--steps", "many"), "at least 2"),
        (("--device", "nowhere"), "no such device"),
        (("--device", "meta"), "autocast only supports"),
        (("--dtype", "float64"), "bfloat16, float16"),
        (("--compiler", "gcc"), "inductor, aot_eager, eager"),
    ],
)
def test_bad_arguments_give_one_line(
    arguments: tuple[str, str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(text in captured.err for text in (*arguments, names))


def test_without_a_cpp_compiler_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(settings: DemoSettings, _: object) -> TrainingComparison:
        raise KeyError(settings.compiler)

    monkeypatch.setattr(demo, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "warm_up", lambda _: None)
    with pytest.raises(KeyError, match="aot_eager"):
        main(["demo"])
    assert "inductor needs a C++ compiler" in capsys.readouterr().out


def test_compilation_is_no_part_of_the_time_per_step() -> None:
    run = TrainingRun("any", losses=[4.0, 2.0, 1.0], times=[90.0, 3.0, 5.0])
    assert (run.first_step, run.step, run.final_loss) == (90.0, 4.0, 1.0)


def test_targets_follow_tokens() -> None:
    batch = random_batch(corpus(), size=3, context=8, rng=torch.Generator().manual_seed(0))
    assert batch.tokens.shape == batch.targets.shape == (3, 8)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert bytes(batch.tokens[0].tolist()) in bytes(corpus().tolist())

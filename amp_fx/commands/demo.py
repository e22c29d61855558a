"""``python -m amp_fx demo``: trains and runs a language model with and without amp_fx."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Table

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.bench.settings import choose, machine, parse_device
from amp_fx.demo.generate import TEXTS, generate
from amp_fx.demo.train import DemoSettings, compare, statements, warm_up
from amp_fx.dtypes import dtype_name, low_dtype_named
from amp_fx.errors import OptionError
from amp_fx.options import COMPILERS, check_device_dtype

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from amp_fx.demo.generate import Texts, Writing
    from amp_fx.demo.train import TrainingComparison, TrainingRun

T = TypeVar("T", "TrainingRun", "Writing")

NUM_GIVEN = 6
"""Length of the prompt in tokens: the first ones of the training text."""

FOLDED = ("casts_shared", "round_trips_removed")
"""Counts of passes that remove casts."""


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns 0."""
    settings = parse_settings(args)
    console = Console()
    needs_compiler = settings.compiler == "inductor" and settings.device.type == "cpu"
    if needs_compiler and not has_cpp_compiler():
        console.print(
            "inductor needs a C++ compiler on the CPU, but none was found: using aot_eager"
        )
        settings = dataclasses.replace(settings, compiler="aot_eager")
    console.print(header(settings))
    warm_up(settings)
    comparison = train(settings, console)
    texts = write(comparison, settings, console)
    console.print(written(comparison, texts))
    console.print(results(comparison))
    console.print(gain(comparison, texts), style="bold")
    return 0


def gain(comparison: TrainingComparison, texts: Texts) -> str:
    """Describes the speedup of this run in one sentence."""
    by_autocast = texts.autocast.step / texts.amp_fx.step
    by_float32 = texts.float32.step / texts.amp_fx.step
    training = comparison.amp_fx.step / comparison.autocast.step
    return (
        f"Here amp_fx writes {by_autocast:.1f} times as many tokens per second as torch.autocast "
        f"and {by_float32:.1f} times as many as float32; its training step takes {training:.2f} "
        "of torch.autocast's time."
    )


def header(settings: DemoSettings) -> str:
    """Describes the machine and the model."""
    facts = machine(settings.device)
    size, device = settings.size, facts.get("gpu", facts["processor"])
    return (
        f"{device}, threads: {facts['threads']}, cores: {facts['cores']}, "
        f"load: {facts.get('load', 'unknown')}, torch {torch.__version__}\n"
        f"a GPT of {size.depth} layers of {size.width}, batches of {settings.batch} x "
        f"{size.context} tokens, {dtype_name(settings.dtype)}, {settings.compiler}"
    )


def parse_settings(args: argparse.Namespace) -> DemoSettings:
    """Checks and converts the arguments."""
    device, dtype = parse_device(args.device), low_dtype_named(args.dtype)
    check_device_dtype(device.type, dtype)
    return DemoSettings(
        steps=_parse_steps(args.steps),
        device=device,
        dtype=dtype,
        compiler=choose("--compiler", args.compiler, COMPILERS),
    )


def _parse_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise OptionError(f"--steps {text}: must be at least 2, because the first step compiles")
    return int(text)


def train(settings: DemoSettings, console: Console) -> TrainingComparison:
    """Trains all contenders, with a progress bar for each."""
    with Progress(console=console) as progress:
        tasks = {}

        def show(run: TrainingRun) -> None:
            if run.name not in tasks:
                tasks[run.name] = progress.add_task(run.name, total=settings.steps)
            description = f"{run.name}, loss {run.losses[-1]:.3f}"
            progress.update(tasks[run.name], advance=1, description=description)

        return compare(settings, show)


def write(comparison: TrainingComparison, settings: DemoSettings, console: Console) -> Texts:
    """Generates a text in each way with the model that amp_fx trained, with a bar for each."""
    prompt = comparison.vocabulary.encode(statements())[:NUM_GIVEN].tolist()
    with Progress(console=console) as progress:
        tasks = {
            run.name: progress.add_task(f"{run.name}, writing", total=1 + TEXTS)
            for run in comparison.runs
        }

        def show(writing: Writing) -> None:
            progress.update(tasks[writing.name], advance=1)

        return generate(comparison.model, prompt, settings, show)


def results(comparison: TrainingComparison) -> RenderableType:
    """Returns the table of the training, with a column per contender."""
    float32, autocast, casts = comparison.float32, comparison.autocast, comparison.casts
    table = Table(title="training", title_justify="left")
    row = _rows(table, comparison.runs)

    def counted(name: str, num: int) -> None:
        row(name, lambda run: str(num) if run is comparison.amp_fx else "-")

    row("loss, first step", lambda run: f"{run.losses[0]:.3f}")
    row("loss, mean of the last tenth", lambda run: f"{run.final_loss:.3f}")
    row("time per step, median", lambda run: f"{run.step * 1e3:.1f} ms")
    row("... relative to float32", lambda run: f"{run.step / float32.step:.2f}")
    row("... relative to torch.autocast", lambda run: f"{run.step / autocast.step:.2f}")
    row("first step, which compiles", lambda run: f"{run.first_step:.1f} s")
    counted("casts inserted", casts["casts_inserted"])
    counted("casts folded", sum(casts[name] for name in FOLDED))
    counted("casts of weights kept", casts["weight_casts_kept"])
    return table


def written(comparison: TrainingComparison, texts: Texts) -> RenderableType:
    """Returns the table of the generation, and the text of amp_fx."""
    float32, autocast = texts.float32, texts.autocast
    table = Table(title="writing, token by token", title_justify="left")
    row = _rows(table, texts.writings)
    row("tokens per second, median", lambda text: f"{1 / text.step:.0f}")
    row("... relative to float32", lambda text: f"{float32.step / text.step:.2f}")
    row("... relative to torch.autocast", lambda text: f"{autocast.step / text.step:.2f}")
    row("first token, which compiles", lambda text: f"{text.first_step:.1f} s")
    row("tokens as in float32", lambda text: _common(text, float32))
    row("... as in torch.autocast", lambda text: _common(text, autocast))
    tokens, decode = texts.amp_fx.tokens, comparison.vocabulary.decode
    prompt, completion = decode(tokens[: texts.num_given]), decode(tokens[texts.num_given :])
    text = f"[bold]{escape(prompt)}[/bold]{escape(completion)}"
    return Group(table, "what amp_fx wrote:", Padding(text, (0, 2)))


def _common(text: Writing, other: Writing) -> str:
    """Returns the length of the common prefix of two texts, such as ``3 of 64``."""
    return f"{text.num_alike(other)} of {len(text.tokens)}"


def _rows(table: Table, contenders: Sequence[T]) -> Callable[[str, Callable[[T], str]], None]:
    """Returns a function that adds a row to a table with a column per contender."""
    table.add_column()
    for contender in contenders:
        table.add_column(contender.name, justify="right")

    def row(name: str, value: Callable[[T], str]) -> None:
        table.add_row(name, *map(value, contenders))

    return row

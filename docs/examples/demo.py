"""Trains a small language model, and lets it write: in float32, under autocast, with amp_fx.

    python demo.py --steps 60

The model predicts a word from the eight before it (Bengio et al., 2003). All three start from the
same weights, see the same batches and take turns, step by step. One step of the smallest model,
measured, decides the size, because CPUs without bfloat16 units multiply in bfloat16 slowly. Figures
are medians with quartiles.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import time
from pydoc_data import topics

import torch
from torch import nn

WIDTHS = (256, 512, 1024, 2048)
STEP_SECONDS = 0.2
"""The most that an eager training step under autocast may take."""
CONTEXT, BATCH, LENGTH, TEXTS = 8, 64, 60, 5


def language_model(num_words: int, width: int) -> nn.Module:
    """Maps words [batch, CONTEXT] to logits of the next word."""
    return nn.Sequential(
        nn.Embedding(num_words, 64),
        nn.Flatten(),
        *(nn.Linear(64 * CONTEXT, width), nn.GELU()),
        *(nn.Linear(width, width), nn.GELU()),
        *(nn.Linear(width, width), nn.GELU()),
        nn.Linear(width, num_words),
    )


class Contender:
    """A copy of the model, a way to run it, and the seconds that it took."""

    def __init__(self, name: str, model: nn.Module, backend: str = "inductor") -> None:
        self.name, self.model = name, copy.deepcopy(model)
        self.device = next(model.parameters()).device
        self.call = torch.compile(self.model, backend=backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.steps: list[float] = []
        self.words: list[float] = []

    def region(self) -> torch.autocast:
        """The region in which the model is called."""
        is_low = self.name != "float32"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_low)

    def step(self, words: torch.Tensor, following: torch.Tensor) -> None:
        """Runs one training step."""
        start = time.perf_counter()
        with self.region():
            loss = nn.functional.cross_entropy(self.call(words), following)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.steps.append(time.perf_counter() - start)

    @torch.no_grad()
    def write(self, words: list[int]) -> list[int]:
        """Writes words after the given ones."""
        for _ in range(LENGTH):
            start = time.perf_counter()
            given = torch.tensor([words[-CONTEXT:]], device=self.device)
            with self.region():
                words = [*words, self.call(given).argmax().item()]
            self.words.append(time.perf_counter() - start)
        return words


def show(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)


def spread(values: list[float], factor: float = 1e3) -> str:
    """The median with quartiles, by default of seconds in milliseconds."""
    low, median, high = (factor * value for value in statistics.quantiles(values, n=4))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def choose_width(num_words: int, words: torch.Tensor, following: torch.Tensor) -> int:
    """The largest width of which a step takes little time, by the time of the smallest."""
    trial = Contender("trial", language_model(num_words, WIDTHS[0]).to(words.device))
    trial.call = trial.model
    for _ in range(3):
        trial.step(words, following)
    seconds = {width: trial.steps[-1] * (width / WIDTHS[0]) ** 2 for width in WIDTHS}
    return max(w for w in WIDTHS if seconds[w] < STEP_SECONDS or w == WIDTHS[0])


def main() -> None:
    """Trains, writes, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    num_steps = parser.parse_args().steps
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    text = " ".join(topics.topics[name] for name in ("while", "if", "for"))
    parts = re.findall(r" ?\w+| ?[^\w\s]+", " ".join(text.replace("*", "").split()))
    vocabulary = sorted({*parts})
    data = torch.tensor([vocabulary.index(part) for part in parts], device=device)
    windows = data.unfold(0, CONTEXT + 1, 1)
    width = choose_width(len(vocabulary), windows[:BATCH, :-1], windows[:BATCH, -1])
    show(f"torch {torch.__version__}, {device}, three layers of {width}, {BATCH} words per step")
    model = language_model(len(vocabulary), width).to(device)
    contenders = [
        Contender("float32", model),
        Contender("torch.autocast", model),
        Contender("amp_fx", model, "amp_fx"),
    ]
    for number in range(num_steps):
        batch = windows[torch.randint(len(windows), (BATCH,), device=device)]
        for each in contenders:
            each.step(batch[:, :-1], batch[:, -1])
            if number == 0:
                show(f"{each.name}: compiled for training in {each.steps[0]:.1f} s")
        if number % 10 == 9:
            losses = ", ".join(f"{each.losses[-1]:.3f}" for each in contenders)
            show(f"step {number + 1} of {num_steps}, losses {losses}")
    trained = contenders[-1].model.state_dict()
    texts = []
    for number in range(TEXTS):
        for each in contenders:
            if number == 0:
                each.model.load_state_dict(trained)
            texts.append(each.write(data[:CONTEXT].tolist()))
            if number == 0:
                show(f"{each.name}: compiled for writing in {each.words[0]:.1f} s")
    show(f"amp_fx wrote: {''.join(vocabulary[word] for word in texts[-1])}\n")
    row = "{:<16}{:<12}{:<28}{:<28}{}".format
    show(row("", "last loss", "ms per training step", "ms per written word", "words as amp_fx"))
    for each, written in zip(contenders, texts, strict=False):
        same = f"{sum(map(int.__eq__, written, texts[-1]))} of {len(written)}"
        seconds = spread(each.steps[1:]), spread(each.words[1:])
        show(row(each.name, f"{each.losses[-1]:.3f}", *seconds, same))
    for other in contenders[:2]:
        ratios = [a / b for a, b in zip(other.words[1:], contenders[-1].words[1:], strict=True)]
        show(f"amp_fx writes {spread(ratios, 1)} times as fast as {other.name}")


if __name__ == "__main__":
    main()

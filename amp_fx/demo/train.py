"""Trains a model in three ways side by side: float32, amp_fx and ``torch.autocast``.

Each contender starts from a copy of the same weights and uses the same batches. Contenders
alternate per step, so that other load on the machine affects all of them equally. Each contender
compiles with empty caches after ``warm_up``, so that initialization does not count for the first.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import re
import statistics
import time
from pydoc_data import topics
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch import nn

from amp_fx import stats
from amp_fx.csrc.build import FOLDER_VARIABLE, cache_folder
from amp_fx.demo.models import GPT, Loss, Size
from amp_fx.grad_scaler import GradScaler
from amp_fx.torch_private.inductor import fresh_cache

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from amp_fx.demo.models import Block

STATEMENTS = ("while", "if", "for")
"""Topics of Python's help that are short enough to be learned in a minute."""

_WORDS = re.compile(r" ?\w+| ?[^\w\s]+")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens and the tokens that follow them; both int64 of shape ``(batch, context)``."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words and punctuation, with the preceding space. A token is an index into ``words``."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """Returns the vocabulary of a text."""
        return cls(tuple(sorted(set(_WORDS.findall(text)))))

    def encode(self, text: str) -> torch.Tensor:
        """Returns the tokens of a text, int64 of shape ``(tokens,)``, without unknown words."""
        return torch.tensor([self._numbers[word] for word in _WORDS.findall(text)])

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens."""
        return "".join(self.words[token] for token in tokens)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def statements() -> str:
    """Returns Python's help on some statements in one line, without headings and code."""
    text = "\n\n".join(topics.topics[name] for name in STATEMENTS)
    prose = (p for p in text.split("\n\n") if not p.startswith(" ") and "***" not in p)
    return " ".join(" ".join(prose).split())


def random_batch(data: torch.Tensor, size: int, context: int, rng: torch.Generator) -> Batch:
    """Returns ``size`` random windows of ``context`` tokens."""
    starts = torch.randint(len(data) - context, (size, 1), generator=rng)
    windows = data[starts + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])


SIZE = Size(width=512, depth=2, heads=8, context=128)
"""Default size: a step takes 50 to 200 ms on two cores, and 50 steps learn half of the text."""

FUSED = ("cpu", "cuda")
"""Device types on which all contenders use the fused AdamW; other devices may lack it."""


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo."""

    steps: int = 50
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    size: Size = SIZE
    batch: int = 4
    learning_rate: float = 1e-3
    seed: int = 0


@dataclasses.dataclass
class TrainingRun:
    """Training of one contender: losses in nats per token, times in seconds."""

    name: str
    losses: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def first_step(self) -> float:
        """Seconds of the first step, which compiles."""
        return self.times[0]

    @property
    def step(self) -> float:
        """Median seconds of all later steps."""
        return statistics.median(self.times[1:])

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


@dataclasses.dataclass(frozen=True)
class TrainingComparison:
    """Results of all contenders, and the model that amp_fx trained."""

    float32: TrainingRun
    amp_fx: TrainingRun
    autocast: TrainingRun
    casts: Counter[str]
    model: GPT
    vocabulary: Vocabulary

    @property
    def runs(self) -> tuple[TrainingRun, TrainingRun, TrainingRun]:
        """The runs in the order in which the contenders alternate."""
        return (self.float32, self.amp_fx, self.autocast)


@dataclasses.dataclass
class Trainer:
    """A compiled copy of the model with its optimizer and loss scaler."""

    run: TrainingRun
    original: Loss
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    region: Callable[[], contextlib.AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch, learning_rate: float) -> None:
        """Runs one training step, timed from the forward to the update of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        start = time.perf_counter()
        with self.region():
            loss = self.model(batch.tokens, batch.targets)
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.run.losses.append(loss.item())
        wait_for(batch.tokens.device)
        self.run.times.append(time.perf_counter() - start)


def compare(
    settings: DemoSettings, on_step: Callable[[TrainingRun], None] | None = None
) -> TrainingComparison:
    """Trains all contenders.

    Returns:
        The losses and times of each.
    """
    torch.manual_seed(settings.seed)
    text = statements()
    vocabulary = Vocabulary.of(text)
    model = GPT(len(vocabulary.words), settings.size)
    initialize(model)
    trainers = _trainers(Loss(model).to(settings.device), settings)
    stats.reset()
    for step, batch in enumerate(_batches(vocabulary.encode(text), settings)):
        for trainer in trainers:
            with empty_caches() if step == 0 else contextlib.nullcontext():
                trainer.step(batch, learning_rate(step, settings))
            if on_step is not None:
                on_step(trainer.run)
    float32, amp_fx, autocast = (trainer.run for trainer in trainers)
    trained = cast("GPT", trainers[1].original.model)
    return TrainingComparison(float32, amp_fx, autocast, stats.snapshot(), trained, vocabulary)


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Context with empty compile caches; the C++ extensions of amp_fx remain cached."""
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(cache_folder())}), fresh_cache():
        yield


def warm_up(settings: DemoSettings) -> None:
    """Compiles a small layer with each backend, to exclude one-time initialization from times."""
    backends: dict[str, dict[str, Any]] = {
        settings.compiler: {},
        "amp_fx": {"options": {"dtype": settings.dtype, "compiler": settings.compiler}},
    }
    for backend, arguments in backends.items():
        layer = nn.Linear(8, 8).to(settings.device)
        compiled = torch.compile(layer, backend=backend, **arguments)
        compiled(torch.ones(2, 8, device=settings.device)).sum().backward()
        with torch.no_grad():
            compiled(torch.ones(2, 8, device=settings.device))


@torch.no_grad()
def initialize(model: GPT) -> None:
    """Initializes a model like GPT-2.

    Weights are normal with a standard deviation of 0.02, divided by the square root of the number
    of residual layers in these layers; biases are 0 (Radford et al., "Language Models are
    Unsupervised Multitask Learners", 2.3, and the published code).
    """
    blocks = cast("list[Block]", list(model.blocks))
    residual = [layer for block in blocks for layer in (block.attention_out, block.mlp[-1])]
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            std = 0.02 / math.sqrt(len(residual)) if layer in residual else 0.02
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    nn.init.normal_(model.token.weight, std=0.02)
    nn.init.normal_(model.position, std=0.02)


def learning_rate(step: int, settings: DemoSettings) -> float:
    """Returns the learning rate of a step: warm-up for a tenth of the steps, then cosine decay."""
    warm_up = min(1.0, (step + 1) / max(1, settings.steps // 10))
    decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / settings.steps)) / 2
    return settings.learning_rate * warm_up * decay


def _trainers(model: Loss, settings: DemoSettings) -> tuple[Trainer, Trainer, Trainer]:
    device_type, dtype, compiler = settings.device.type, settings.dtype, settings.compiler
    options = {"dtype": dtype, "compiler": compiler}
    # float16 gradients need scaling; disabled scalers have no effect.
    scaling: dict[str, Any] = {"device": device_type, "enabled": dtype is torch.float16}
    return (
        _trainer("float32", model, GradScaler(device_type, enabled=False), backend=compiler),
        _trainer("amp_fx", model, GradScaler(**scaling), backend="amp_fx", options=options),
        _trainer(
            "torch.autocast",
            model,
            torch.amp.GradScaler(**scaling),
            region=functools.partial(torch.autocast, device_type, dtype),
            backend=compiler,
        ),
    )


def _trainer(
    name: str,
    model: Loss,
    scaler: torch.amp.GradScaler,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **compile_arguments: Any,
) -> Trainer:
    original = copy.deepcopy(model)
    fused = next(original.parameters()).device.type in FUSED or None  # None: torch chooses
    optimizer = torch.optim.AdamW(original.parameters(), betas=(0.9, 0.95), fused=fused)
    compiled = torch.compile(original, **compile_arguments)
    return Trainer(TrainingRun(name), original, compiled, region, scaler, optimizer)


def _batches(data: torch.Tensor, settings: DemoSettings) -> Iterator[Batch]:
    rng = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        batch = random_batch(data, settings.batch, settings.size.context, rng)
        yield Batch(batch.tokens.to(settings.device), batch.targets.to(settings.device))


def wait_for(device: torch.device) -> None:
    """Waits for all queued work of an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Trains one model three ways side by side: float32, amp_fx and ``torch.autocast``.

Every contender starts from a copy of the same weights and sees the same batches. They take turns
step by step, so that whatever else the machine does hits all of them alike. Each compiles with
empty caches, after ``warm_up``, so that the first one does not pay for the others.
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
"""Topics that are short enough to be learned in a minute."""

_WORDS = re.compile(r" ?\w+| ?[^\w\s]+")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Text and what follows each token of it; both int64, of shape ``(batch, context)``."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words and punctuation, each with the space before it; a token is the number of one."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """Returns the vocabulary of a text."""
        return cls(tuple(sorted(set(_WORDS.findall(text)))))

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of a text, int64, of shape ``(tokens,)``; words must be known ones."""
        return torch.tensor([self._numbers[word] for word in _WORDS.findall(text)])

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return "".join(self.words[token] for token in tokens)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def statements() -> str:
    """Returns Python's help on some statements, without headings and code, in one line."""
    text = "\n\n".join(topics.topics[name] for name in STATEMENTS)
    prose = (p for p in text.split("\n\n") if not p.startswith(" ") and "***" not in p)
    return " ".join(" ".join(prose).split())


def random_batch(data: torch.Tensor, size: int, context: int, rng: torch.Generator) -> Batch:
    """A batch of ``size`` windows of ``context`` tokens, from anywhere in the text."""
    starts = torch.randint(len(data) - context, (size, 1), generator=rng)
    windows = data[starts + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])


SIZE = Size(width=512, depth=2, heads=8, context=128)
"""At which a step takes 50 to 200 ms on two cores, and the text is half learned in fifty."""

FUSED = ("cpu", "cuda")
"""Device types whose AdamW is the fused one, for all contenders: others may have none."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings: what to train, where, and for how long."""

    steps: int = 50
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    size: Size = SIZE
    batch: int = 4
    learning_rate: float = 1e-3
    seed: int = 0


@dataclasses.dataclass
class Run:
    """One contender's training: losses in nats per token, times in seconds."""

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
class Comparison:
    """Holds the results."""

    float32: Run
    amp_fx: Run
    autocast: Run
    casts: Counter[str]
    model: GPT
    vocabulary: Vocabulary

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """All runs, in the order in which they take turns."""
        return (self.float32, self.amp_fx, self.autocast)


@dataclasses.dataclass
class Trainer:
    """A compiled copy of the model with its own optimizer and loss scaler."""

    run: Run
    own: Loss
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    region: Callable[[], contextlib.AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler  # ours is one too
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch, learning_rate: float) -> None:
        """One step of training, timed from the forward pass to the updated weights."""
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


def compare(settings: Settings, on_step: Callable[[Run], None] | None = None) -> Comparison:
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
    trained = cast("GPT", trainers[1].own.model)
    return Comparison(float32, amp_fx, autocast, stats.snapshot(), trained, vocabulary)


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Compiles as on a machine that compiled nothing before; what amp_fx has built stays."""
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(cache_folder())}), fresh_cache():
        yield


def warm_up(settings: Settings) -> None:
    """Compiles something small with each backend: all that is done once in a process."""
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
    """Gives a model the weights that GPT-2 begins with.

    Those are normal numbers of 0.02, smaller by the root of their number for layers whose outputs
    are summed, and no biases (Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2.3, and the published code).
    """
    blocks = cast("list[Block]", list(model.blocks))
    summed = [layer for block in blocks for layer in (block.attention_out, block.mlp[-1])]
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            std = 0.02 / math.sqrt(len(summed)) if layer in summed else 0.02
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    nn.init.normal_(model.token.weight, std=0.02)
    nn.init.normal_(model.position, std=0.02)


def learning_rate(step: int, settings: Settings) -> float:
    """It rises for a tenth of the steps, and falls to a twentieth along a cosine."""
    warm_up = min(1.0, (step + 1) / max(1, settings.steps // 10))
    decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / settings.steps)) / 2
    return settings.learning_rate * warm_up * decay


def _trainers(model: Loss, settings: Settings) -> tuple[Trainer, Trainer, Trainer]:
    device_type, dtype, compiler = settings.device.type, settings.dtype, settings.compiler
    options = {"dtype": dtype, "compiler": compiler}
    # float16 gradients need scaling; a scaler that is not enabled passes everything through.
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
    own = copy.deepcopy(model)
    fused = next(own.parameters()).device.type in FUSED or None  # None: torch chooses
    optimizer = torch.optim.AdamW(own.parameters(), betas=(0.9, 0.95), fused=fused)
    compiled = torch.compile(own, **compile_arguments)
    return Trainer(Run(name), own, compiled, region, scaler, optimizer)


def _batches(data: torch.Tensor, settings: Settings) -> Iterator[Batch]:
    rng = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        batch = random_batch(data, settings.batch, settings.size.context, rng)
        yield Batch(batch.tokens.to(settings.device), batch.targets.to(settings.device))


def wait_for(device: torch.device) -> None:
    """Waits until an accelerator has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

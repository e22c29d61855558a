"""Trains one model three ways side by side: float32, amp_fx and ``torch.autocast``.

Every contender starts from a copy of the same weights and sees the same batches. They take turns
step by step, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx import stats
from amp_fx.demo.models import GPT, Loss, Size
from amp_fx.demo.text import NUM_BYTES, Batch, corpus, random_batch
from amp_fx.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

LEARNING_RATE = 4e-3
SMALL = Size(width=64, depth=2, heads=4, context=64)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train, where, and for how long."""

    steps: int = 100
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    size: Size = SMALL
    batch: int = 8
    seed: int = 0


@dataclasses.dataclass
class Run:
    """One contender's training: losses in nats per byte, times in seconds."""

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
    """What came out: a run per contender, and what amp_fx did to the graphs."""

    float32: Run
    amp_fx: Run
    autocast: Run
    casts: Counter[str]

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """All runs, in the order in which they take turns."""
        return (self.float32, self.amp_fx, self.autocast)


@dataclasses.dataclass
class Trainer:
    """A compiled copy of the model with its own optimizer and loss scaler."""

    run: Run
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    region: Callable[[], contextlib.AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler  # ours is one too
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch) -> None:
        """One step of training, timed from the forward pass to the updated weights."""
        start = time.perf_counter()
        with self.region():
            loss = self.model(batch.tokens, batch.targets)
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.run.losses.append(loss.item())
        _wait_for(batch.tokens.device)
        self.run.times.append(time.perf_counter() - start)


def compare(settings: Settings, on_step: Callable[[Run], None] | None = None) -> Comparison:
    """Trains all contenders.

    Args:
        settings: What to train, where, and for how long.
        on_step: Called with a contender's run after each of its steps.

    Returns:
        The losses and times of each.
    """
    torch.manual_seed(settings.seed)
    model = Loss(GPT(NUM_BYTES, settings.size)).to(settings.device)
    trainers = _trainers(model, settings)
    stats.reset()
    for batch in _batches(settings):
        for trainer in trainers:
            trainer.step(batch)
            if on_step is not None:
                on_step(trainer.run)
    float32, amp_fx, autocast = (trainer.run for trainer in trainers)
    return Comparison(float32, amp_fx, autocast, stats.snapshot())


def _trainers(model: nn.Module, settings: Settings) -> tuple[Trainer, Trainer, Trainer]:
    device_type, dtype, compiler = settings.device.type, settings.dtype, settings.compiler
    options = {"dtype": dtype, "compiler": compiler}
    # float16 gradients need scaling; a scaler that is not enabled passes everything through.
    scaling: dict[str, Any] = {"device": device_type, "enabled": dtype is torch.float16}
    return (
        _trainer("float32", model, GradScaler(enabled=False), backend=compiler),
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
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **compile_arguments: Any,
) -> Trainer:
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=LEARNING_RATE)
    return Trainer(Run(name), torch.compile(own, **compile_arguments), region, scaler, optimizer)


def _batches(settings: Settings) -> Iterator[Batch]:
    data = corpus()
    rng = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        batch = random_batch(data, settings.batch, settings.size.context, rng)
        yield Batch(batch.tokens.to(settings.device), batch.targets.to(settings.device))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

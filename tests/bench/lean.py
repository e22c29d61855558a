"""What the ``lean`` preset saves, and whether it costs anything: training next to the default.

Language models learn real text, a ResNet and a U-Net learn pictures of shapes, each from several
seeds: what the preset does to the loss is to be held against what another seed does to it. On a
CPU both policies run by CUDA's lists, because the CPU's own keep normalizations and softmax low
already; so this says little about time there.

``python -m tests.bench.lean`` takes the options of ``python -m amp_fx.bench``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
import time
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.bench.__main__ import main
from amp_fx.bench.cases import CASES, Case
from amp_fx.bench.compare import Comparison, Figure, Measured, MemoryMeter
from amp_fx.bench.timing import WARM_UP_CALLS, time_in_turns
from amp_fx.demo.models import Size
from amp_fx.demo.train import random_batch
from amp_fx.policies.policy import preset
from tests.models.pictures import NOISE, ResNet, UNet, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.settings import Settings
    from amp_fx.policies.policy import Policy

POLICIES = ("torch", "lean")
LEARNING_RATE = 2e-3

NUM_BYTES = 256
"""How many different tokens byte-level text can have."""


def corpus() -> torch.Tensor:
    """Python's help topics, some 450 kB, as a uint8 tensor of shape ``(bytes,)``."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


class Block(nn.Module):
    """Causal attention, written out, and a perceptron; the norm before each or after."""

    def __init__(self, size: Size, *, is_norm_first: bool) -> None:
        """A block with random weights."""
        super().__init__()
        self.heads = size.heads
        self.is_norm_first = is_norm_first
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        mask = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, context, width)`` to the same shape."""
        first, second = self.norms
        if self.is_norm_first:
            x = x + self._attend(first(x))
            changed: torch.Tensor = x + self.mlp(second(x))
            return changed
        x = first(x + self._attend(x))
        normed: torch.Tensor = second(x + self.mlp(x))
        return normed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(self.mask, float("-inf")).softmax(-1)
        mixed: torch.Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return mixed


class LanguageModel(nn.Module):
    """Predicts the next byte; the forward pass returns the loss."""

    def __init__(self, size: Size, *, is_norm_first: bool) -> None:
        """A model with random weights."""
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        blocks = (Block(size, is_norm_first=is_norm_first) for _ in range(size.depth))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(size.width, NUM_BYTES)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy, in nats per byte, of ``(batch, context)`` tokens."""
        x = self.token(tokens) + self.position
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        name: What the table calls it.
        build: Makes the model, whose forward gives the loss.
        batches: Endless arguments for the model, from a seed.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[torch.Tensor, ...]]]


@dataclasses.dataclass
class _Trainer:
    """A model under one policy, with its optimizer and the losses so far, by seed."""

    name: str
    model: nn.Module
    compiled: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[list[float]] = dataclasses.field(default_factory=list)

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Goes on from these weights, with an optimizer that knows nothing."""
        self.model.load_state_dict(weights)
        self.optimizer = _optimizer(self.model)
        self.losses.append([])

    def step(self, batch: tuple[torch.Tensor, ...]) -> None:
        """One update."""
        loss = self.compiled(*batch)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[-1].append(loss.detach().item())

    def saved_bytes(self, batch: tuple[torch.Tensor, ...]) -> int:
        """Bytes of activations that a forward keeps for its backward; weights are not counted."""
        weights = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in weights and tensor.dim() >= 2:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.compiled(*batch)
        rows = len(batch[0])
        return sum(t.untyped_storage().nbytes() for t in saved.values() if t.numel() % rows == 0)


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """For each task the losses of all seeds, then memory and time of a step."""
    for task in _tasks(settings):
        yield from _compare(task, settings, watch)
        torch._dynamo.reset()


def _compare(task: Task, settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    batch = next(task.batches(0))
    trainers, measured = [], []
    for number, name in enumerate(POLICIES):
        watch(f"{task.name}: training with {name}", number, len(POLICIES))
        meter = MemoryMeter(settings.device)
        trainer = _trainer(name, task, settings)
        start = time.perf_counter()
        for seed in range(_num_seeds(settings)):
            _learn(trainer, task, seed, _num_steps(settings))
            if seed == 0:
                first_call = time.perf_counter() - start
        again = functools.partial(trainer.step, batch)
        measured.append((name, again, first_call, meter.peak(again)))
        trainers.append(trainer)
    yield from _losses(task.name, trainers)
    timings = time_in_turns(
        {name: again for name, again, *_ in measured},
        repeats=settings.repeats,
        steps=settings.steps,
    )
    yield Comparison(
        task.name,
        tuple(
            Measured(name, timings[name], peak, first_call)
            for name, _, first_call, peak in measured
        ),
    )
    for trainer in trainers:
        saved = trainer.saved_bytes(batch) / 2**20
        yield Figure(f"{task.name}: saved for the backward with {trainer.name}", saved, "MiB")


def _learn(trainer: _Trainer, task: Task, seed: int, num_steps: int) -> None:
    torch.manual_seed(seed)
    trainer.begin(task.build().state_dict())
    for batch in itertools.islice(task.batches(seed), num_steps):
        trainer.step(batch)


def _losses(kind: str, trainers: Sequence[_Trainer]) -> Iterator[Figure]:
    """The loss in the last tenth of the steps: its mean over seeds, and how far these differ."""
    last = {
        trainer.name: [statistics.fmean(losses[-max(1, len(losses) // 10) :]) for losses in each]
        for trainer in trainers
        for each in [trainer.losses]
    }
    for name, losses in last.items():
        yield Figure(f"{kind}: last loss with {name}, mean of seeds", statistics.fmean(losses), "")
        yield Figure(f"{kind}: ... from the least to the most", max(losses) - min(losses), "")
    default, lean = (statistics.fmean(last[name]) for name in POLICIES)
    yield Figure(f"{kind}: lean's mean less torch's", lean - default, "")


def _trainer(name: str, task: Task, settings: Settings) -> _Trainer:
    torch.manual_seed(0)
    model = task.build().to(settings.device)
    options: dict[str, Any] = {
        "policy": policy_for(name, settings.device.type),
        "dtype": settings.dtype,
        "compiler": settings.compiler,
    }
    compiled = torch.compile(model, backend="amp_fx", options=options)
    return _Trainer(name, model, compiled, _optimizer(model))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def policy_for(name: str, device_type: str) -> Policy:
    """A preset; on a CPU with the lists that it has for CUDA."""
    policy = preset(name)
    return policy.with_device("cpu", policy.tables["cuda"]) if device_type == "cpu" else policy


def _tasks(settings: Settings) -> list[Task]:
    size, width = _size(settings), settings.pick(tiny=8, cpu=32, accelerator=128)
    depth = settings.pick(tiny=1, cpu=3, accelerator=8)
    batches = functools.partial(_text, settings, size)
    return [
        Task("norm last", lambda: LanguageModel(size, is_norm_first=False), batches),
        Task("norm first", lambda: LanguageModel(size, is_norm_first=True), batches),
        Task("ResNet", lambda: ResNet(width, depth), functools.partial(_pictures, settings)),
        Task("U-Net", lambda: UNet(width), functools.partial(_noisy, settings)),
    ]


def _size(settings: Settings) -> Size:
    return Size(
        width=settings.pick(tiny=16, cpu=128, accelerator=768),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=2, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=4, accelerator=12),
        context=settings.pick(tiny=8, cpu=128, accelerator=512),
    )


def _num_steps(settings: Settings) -> int:
    return settings.pick(tiny=WARM_UP_CALLS, cpu=300, accelerator=1000)


def _num_seeds(settings: Settings) -> int:
    return settings.pick(tiny=2, cpu=3, accelerator=3)


def _text(settings: Settings, size: Size, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    data, rng = corpus(), torch.Generator().manual_seed(seed)
    num = settings.pick(tiny=1, cpu=4, accelerator=32)
    while True:
        batch = random_batch(data, num, size.context, rng)
        yield batch.tokens.to(settings.device), batch.targets.to(settings.device)


def _pictures(settings: Settings, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    num = settings.pick(tiny=2, cpu=16, accelerator=128)
    for pictures, noise, kinds in _shapes(settings, num, seed):
        yield pictures + noise, kinds


def _noisy(settings: Settings, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    num = settings.pick(tiny=2, cpu=8, accelerator=64)
    for pictures, noise, _ in _shapes(settings, num, seed):
        yield pictures, noise


def _shapes(settings: Settings, num: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Pictures, noise for them, and what they show."""
    rng, size = torch.Generator().manual_seed(seed), settings.pick(tiny=8, cpu=32, accelerator=64)
    while True:
        pictures, kinds = shapes(num, size, rng)
        noise = NOISE * torch.randn(pictures.shape, generator=rng)
        yield [each.to(settings.device) for each in (pictures, noise, kinds)]


if __name__ == "__main__":
    CASES["lean"] = Case("training with the lean preset: memory, time, losses", run)
    sys.exit(main(["lean", *sys.argv[1:]]))

"""What the ``lean`` preset saves: training steps on real text, next to the default policy.

On a CPU both run by CUDA's lists, because the CPU's own keep normalizations and softmax low
already; so this says what the preset does to memory and losses there, and little about time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.bench.compare import Comparison, Figure, Measured
from amp_fx.bench.memory import MemoryMeter
from amp_fx.bench.timing import WARM_UP_CALLS, time_in_turns, wait_for
from amp_fx.demo.models import Size
from amp_fx.demo.text import NUM_BYTES, Batch, corpus, random_batch
from amp_fx.policies.policy import preset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.settings import Settings
    from amp_fx.policies.policy import Policy

POLICIES = ("torch", "lean")
LEARNING_RATE = 2e-3


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
        self.start = nn.Linear(size.width, size.width)  # from here on activations are low
        blocks = (Block(size, is_norm_first=is_norm_first) for _ in range(size.depth))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(size.width, NUM_BYTES)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy, in nats per byte, of ``(batch, context)`` tokens."""
        x = self.start(self.token(tokens) + self.position)
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclasses.dataclass
class _Trainer:
    """A model under one policy, with its optimizer and the losses so far."""

    name: str
    model: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)

    def step(self, batch: Batch) -> None:
        loss = self.model(batch.tokens, batch.targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().item())

    def saved_bytes(self, batch: Batch) -> int:
        """Bytes of activations that a forward keeps for its backward; weights are not counted."""
        weights = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in weights and tensor.dim() >= 2:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.model(batch.tokens, batch.targets)
        rows = batch.tokens.numel()
        return sum(t.untyped_storage().nbytes() for t in saved.values() if t.numel() % rows == 0)


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Loss curves, then memory and time of a step, for both orders of norm and change."""
    for is_norm_first in (False, True):
        kind = "norm first" if is_norm_first else "norm last"
        yield from _compare(kind, settings, watch, is_norm_first=is_norm_first)
        torch._dynamo.reset()


def _compare(
    kind: str, settings: Settings, watch: Watch, *, is_norm_first: bool
) -> Iterator[Comparison | Figure]:
    size = _size(settings)
    batches = list(itertools.islice(_batches(settings, size), _num_steps(settings)))
    trainers, measured = [], []
    for number, name in enumerate(POLICIES):
        watch(f"{kind}: training with {name}", number, len(POLICIES))
        meter = MemoryMeter(settings.device)
        trainer = _trainer(name, settings, size, is_norm_first=is_norm_first)
        start = time.perf_counter()
        trainer.step(batches[0])
        wait_for(settings.device)
        first_call = time.perf_counter() - start
        for batch in batches[1:]:
            trainer.step(batch)
        again = functools.partial(trainer.step, batches[-1])
        measured.append((name, again, first_call, meter.peak(again)))
        trainers.append(trainer)
    timings = time_in_turns(
        {name: again for name, again, *_ in measured},
        repeats=settings.repeats,
        steps=settings.steps,
        device=settings.device,
    )
    what = f"{kind}: {size.depth} layers of {size.width}, {len(batches[0].tokens)} x {size.context}"
    yield Comparison(
        what,
        tuple(
            Measured(name, timings[name], peak, first_call)
            for name, _, first_call, peak in measured
        ),
    )
    for trainer in trainers:
        saved = trainer.saved_bytes(batches[-1]) / 2**20
        yield Figure(f"{kind}: saved for the backward with {trainer.name}", saved, "MiB")
    for start in _milestones(len(batches)):
        for trainer in trainers:
            window = trainer.losses[start : start + max(1, len(batches) // 10)]
            loss = statistics.fmean(window)
            yield Figure(f"{kind}: loss of {trainer.name} from step {start}", loss, "nats")


def _trainer(name: str, settings: Settings, size: Size, *, is_norm_first: bool) -> _Trainer:
    torch.manual_seed(0)
    model = LanguageModel(size, is_norm_first=is_norm_first).to(settings.device)
    options: dict[str, Any] = {
        "policy": policy_for(name, settings.device.type),
        "dtype": settings.dtype,
        "compiler": settings.compiler,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return _Trainer(name, torch.compile(model, backend="amp_fx", options=options), optimizer)


def policy_for(name: str, device_type: str) -> Policy:
    """A preset; on a CPU with the lists that it has for CUDA."""
    policy = preset(name)
    return policy.with_device("cpu", policy.tables["cuda"]) if device_type == "cpu" else policy


def _size(settings: Settings) -> Size:
    return Size(
        width=settings.pick(tiny=16, cpu=128, accelerator=768),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=2, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=4, accelerator=12),
        context=settings.pick(tiny=8, cpu=128, accelerator=512),
    )


def _num_steps(settings: Settings) -> int:
    return settings.pick(tiny=WARM_UP_CALLS, cpu=60, accelerator=1000)


def _milestones(num_steps: int) -> list[int]:
    """Where the curves are read: at the start, on the way, in the last tenth."""
    return sorted({num_steps * tenth // 10 for tenth in (0, 2, 5, 9)})


def _batches(settings: Settings, size: Size) -> Iterator[Batch]:
    data, rng = corpus(), torch.Generator().manual_seed(0)
    num = settings.pick(tiny=1, cpu=4, accelerator=32)
    while True:
        batch = random_batch(data, num, size.context, rng)
        yield Batch(batch.tokens.to(settings.device), batch.targets.to(settings.device))

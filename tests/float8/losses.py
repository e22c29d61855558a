"""Trains a small Transformer and a small ViT in bfloat16 and in float8, with several seeds.

Run ``python -m tests.float8.losses``; it takes some minutes on one core and prints the table of
``docs/guide/float8.md``. The models learn from synthetic data: the next token of a random Markov
chain, and which of 16 pictures is hidden by noise. Losses are means over the last steps, on batches
that the model has never seen.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import amp_fx
from amp_fx.tables.float8 import FLOAT8_PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Batch = tuple[Tensor, Tensor]

WIDTH, HEADS, BLOCKS = 64, 4, 2
LAST = 50
"""Steps over which the loss is averaged in the end."""


class Block(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.second_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return x + y


def _task() -> torch.Generator:
    """Returns the generator of the task, which is the same for all seeds."""
    return torch.Generator().manual_seed(0)


class Transformer(nn.Module):
    """Predicts the next of 64 tokens."""

    num_tokens, length = 64, 32

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(self.num_tokens, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(self.length, WIDTH))
        self.blocks = nn.Sequential(*(Block(is_causal=True) for _ in range(BLOCKS)))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, self.num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.first(nn.functional.one_hot(tokens, self.num_tokens).float()) + self.places
        y: Tensor = self.last(self.norm(self.blocks(found)))
        return y.flatten(0, 1)

    @classmethod
    def batches(cls, generator: torch.Generator) -> Callable[[], Batch]:
        """Sequences of one Markov chain, in which few tokens are likely after each."""
        chain = (3 * torch.randn(cls.num_tokens, cls.num_tokens, generator=_task())).softmax(-1)

        def draw() -> Batch:
            tokens = [torch.randint(cls.num_tokens, (16,), generator=generator)]
            for _ in range(cls.length):
                following = torch.multinomial(chain[tokens[-1]], 1, generator=generator)
                tokens.append(following.squeeze(1))
            found = torch.stack(tokens, 1)
            return found[:, :-1], found[:, 1:].flatten()

        return draw


class ViT(nn.Module):
    """Tells 16 classes of pictures apart."""

    num_classes, size, patch = 16, 16, 4

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * self.patch**2, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn((self.size // self.patch) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block(is_causal=False) for _ in range(BLOCKS)))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, self.num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = nn.functional.unfold(pictures, self.patch, stride=self.patch).transpose(1, 2)
        y: Tensor = self.last(self.norm(self.blocks(self.first(patches) + self.places)).mean(1))
        return y

    @classmethod
    def batches(cls, generator: torch.Generator) -> Callable[[], Batch]:
        """Returns one picture for each class, under noise."""
        pictures = torch.randn(cls.num_classes, 3, cls.size, cls.size, generator=_task())

        def draw() -> Batch:
            classes = torch.randint(cls.num_classes, (32,), generator=generator)
            noise = torch.randn(32, 3, cls.size, cls.size, generator=generator)
            return pictures[classes] + 4 * noise, classes

        return draw


def train(kind: Any, policy: str, seed: int, num_steps: int) -> float:
    """Returns the mean loss of the last steps.

    Args:
        kind: The class of the model.
        policy: The name of a preset; ``"float32"`` for no region.
        seed: Of weights and data.
        num_steps: Of the training.
    """
    torch.manual_seed(seed)
    model = kind()
    draw = kind.batches(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options: dict[str, Any] = {"policy": policy, "compiler": "eager", "weight_cache": False}
    is_plain = policy == "float32"
    call = model if is_plain else torch.compile(model, backend="amp_fx", options=options)
    losses = []
    for _ in range(num_steps):
        x, targets = draw()
        with torch.autocast("cpu", enabled=policy != "float32"):
            loss = nn.functional.cross_entropy(call(x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


def rows(kind: Any, seeds: Sequence[int], num_steps: int) -> list[tuple[str, float, float, float]]:
    """By policy: the mean over seeds, their standard deviation, the mean difference from bfloat16.

    The difference is that of equal seeds.
    """
    found = []
    low = [train(kind, "torch", seed, num_steps) for seed in seeds]
    for name in FLOAT8_PRESETS:
        losses = [train(kind, name, seed, num_steps) for seed in seeds]
        difference = statistics.mean(a - b for a, b in zip(losses, low, strict=True))
        found.append((name, statistics.mean(losses), statistics.stdev(losses), difference))
    return [("bfloat16", statistics.mean(low), statistics.stdev(low), 0.0), *found]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore", amp_fx.errors.DtypeWarning)
    torch.set_num_threads(1)
    print("| model | policy | loss | spread of seeds | difference from bfloat16 |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for kind in (Transformer, ViT):
        for name, mean, spread, difference in rows(kind, range(args.seeds), args.steps):
            cells = (kind.__name__, name, f"{mean:.4f}", f"{spread:.4f}", f"{difference:+.4f}")
            print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

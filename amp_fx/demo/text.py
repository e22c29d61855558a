"""Real text that every Python brings along, as bytes: the topics of ``help()``."""

from __future__ import annotations

import dataclasses
from pydoc_data import topics

import torch

NUM_BYTES = 256
"""How many different tokens byte-level text can have."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Text and what follows each byte of it; both int64, of shape ``(batch, context)``."""

    tokens: torch.Tensor
    targets: torch.Tensor


def corpus() -> torch.Tensor:
    """Python's help topics, some 450 kB, as a uint8 tensor of shape ``(bytes,)``."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def random_batch(data: torch.Tensor, size: int, context: int, rng: torch.Generator) -> Batch:
    """A batch of ``size`` windows of ``context`` bytes, from anywhere in the text."""
    starts = torch.randint(len(data) - context, (size, 1), generator=rng)
    windows = data[starts + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])

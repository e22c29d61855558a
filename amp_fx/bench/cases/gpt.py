"""Decoders: one more token, as when serving, and training in micro-batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from amp_fx.bench.contenders import MICRO_BATCHES, Workload
from amp_fx.demo.models import GPT, Decoder, Loss, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.settings import Settings

NUM_PAST = 128
"""Positions whose keys and values a decoded token attends to."""


def decode_workloads(settings: Settings) -> Iterator[Workload]:
    """GPT-2 small, one sequence."""
    num_tokens = settings.pick(tiny=64, cpu=50257)
    past = settings.pick(tiny=4, cpu=NUM_PAST)
    size = Size(
        width=settings.pick(tiny=16, cpu=768),
        depth=settings.num_layers(12),
        heads=settings.pick(tiny=2, cpu=12),
        context=settings.pick(tiny=8, cpu=1024),
    )
    token = torch.zeros(1, 1, dtype=torch.long, device=settings.device)
    shape = (size.depth, 2, 1, size.heads, past, size.width // size.heads)
    yield Workload(
        f"{size.depth} layers of {size.width}, {past} tokens before",
        functools.partial(Decoder, num_tokens, size),
        (token, torch.randn(shape, device=settings.device)),
        has_low_inputs=True,
    )


def train_workloads(settings: Settings) -> Iterator[Workload]:
    """A model that fits the machine; the weights change once per 1, 4 or 16 casts."""
    num_tokens = settings.pick(tiny=64, cpu=4096, accelerator=50257)
    size = train_size(settings)
    batch = settings.pick(tiny=1, cpu=2, accelerator=8)
    tokens = torch.randint(num_tokens, (batch, size.context), device=settings.device)
    for micro_batches in MICRO_BATCHES:
        tokens_each = f"{batch} x {size.context} tokens"
        yield Workload(
            f"{size.depth} layers of {size.width}, {micro_batches} micro-batches of {tokens_each}",
            functools.partial(build_training, num_tokens, size),
            (tokens, tokens),
            micro_batches=micro_batches,
        )


def train_size(settings: Settings) -> Size:
    """How large the trained model is."""
    return Size(
        width=settings.pick(tiny=16, cpu=256, accelerator=768),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=4, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=4, accelerator=12),
        context=settings.pick(tiny=8, cpu=64, accelerator=512),
    )


def build_training(num_tokens: int, size: Size) -> nn.Module:
    """The loss of a GPT."""
    return Loss(GPT(num_tokens, size))

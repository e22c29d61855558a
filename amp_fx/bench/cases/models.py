"""Workloads of small models, and the check that two equal contenders take the same time."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from amp_fx.bench.compare import compare, paired_figure
from amp_fx.bench.contenders import BY_NAME, MICRO_BATCHES, NATIVE, Workload
from amp_fx.demo.models import GPT, MLP, Decoder, LoopedCell, Loss, ResNet, Size, ViT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Comparison, Figure, Watch
    from amp_fx.bench.settings import Settings


NUM_PAST = 128
"""Number of cached positions to which a decoded token attends."""


def gpt_decode(settings: Settings) -> Iterator[Workload]:
    """Yields the decoding of one token of one sequence by GPT-2 small."""
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
        weight_bytes=2 * size.width * (12 * size.depth * size.width + num_tokens),
    )


def gpt_training(settings: Settings) -> Iterator[Workload]:
    """Yields training of a GPT whose weights are updated every 1, 4 or 16 backward passes."""
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
    """Returns the size of the trained model."""
    return Size(
        width=settings.pick(tiny=16, cpu=256, accelerator=768),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=4, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=4, accelerator=12),
        context=settings.pick(tiny=8, cpu=64, accelerator=512),
    )


def build_training(num_tokens: int, size: Size) -> nn.Module:
    """Returns a module that computes the loss of a GPT."""
    return Loss(GPT(num_tokens, size))


NUM_CLASSES = 100


def conv(settings: Settings) -> Iterator[Workload]:
    """Yields inference of one image, then training, of a ResNet."""
    side = settings.pick(tiny=32, cpu=64, accelerator=224)
    width = settings.pick(tiny=4, cpu=64)
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    build = functools.partial(ResNet, width, settings.pick(tiny=1, cpu=2), NUM_CLASSES)
    images = torch.randn(batch, 3, side, side, device=settings.device)
    classes = torch.randint(NUM_CLASSES, (batch,), device=settings.device)
    yield Workload(f"inference, 1 image of {side}", build, (images[:1].clone(),))
    yield Workload(
        f"training, {batch} images of {side}",
        lambda: Loss(build()),
        (images, classes),
        micro_batches=1,
    )


def vit(settings: Settings) -> Iterator[Workload]:
    """Yields inference, then training, of a vision Transformer."""
    side = settings.pick(tiny=8, cpu=64, accelerator=224)
    patch = settings.pick(tiny=4, cpu=8, accelerator=16)
    size = Size(
        width=settings.pick(tiny=16, cpu=192, accelerator=384),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=6, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=3, accelerator=6),
        context=(side // patch) ** 2,
    )
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    images = torch.randn(batch, 3, side, side, device=settings.device)
    classes = torch.randint(NUM_CLASSES, (batch,), device=settings.device)
    name = f"{size.depth} layers of {size.width}, {batch} images of {side}"
    build = functools.partial(ViT, size, patch, NUM_CLASSES)
    yield Workload(f"inference, {name}", build, (images,))
    yield Workload(f"training, {name}", lambda: Loss(build()), (images, classes), micro_batches=1)


def mlp(settings: Settings) -> Iterator[Workload]:
    """Yields inference of a deep and a wide MLP, with batches of 1 and 4."""
    for usual, depth in ((1024, 6), (4096, 2)):
        width = settings.pick(tiny=usual // 64, cpu=usual)
        build = functools.partial(MLP, width, depth)
        for batch in (1, 4):
            x = torch.randn(batch, width, device=settings.device)
            yield Workload(f"Linear({width}) x{depth}, batch {batch}", build, (x,))


def mlp_training(settings: Settings) -> Iterator[Workload]:
    """Yields training of an MLP whose weights fused AdamW updates every 1, 4 or 16 backwards."""
    width = settings.pick(tiny=16, cpu=512)
    depth = settings.pick(tiny=2, cpu=9)
    batch = settings.pick(tiny=2, cpu=32)
    x = torch.randn(batch, width, device=settings.device)
    classes = torch.randint(width, (batch,), device=settings.device)
    for micro_batches in MICRO_BATCHES:
        yield Workload(
            f"Linear({width}) x{depth}, fused AdamW, {micro_batches} micro-batches of {batch}",
            lambda: Loss(MLP(width, depth)),
            (x, classes),
            micro_batches=micro_batches,
        )


def lstm_cell(settings: Settings) -> Iterator[Workload]:
    """Yields inference, then training, of a loop over an LSTM cell."""
    width = settings.pick(tiny=8, cpu=512)
    steps = settings.pick(tiny=2, cpu=16)
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    x = torch.randn(steps, batch, width, device=settings.device)
    targets = torch.randint(width, (batch,), device=settings.device)
    name = f"{steps} steps of {width}, batch {batch}"
    build = functools.partial(LoopedCell, width)
    yield Workload(f"inference, {name}", build, (x,))
    yield Workload(f"training, {name}", lambda: Loss(build()), (x, targets), micro_batches=1)


TWIN = dataclasses.replace(BY_NAME[NATIVE], name=f"{NATIVE}-twin")


def fairness(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Times native and a second, independent native, which should take the same time.

    The distance of their ratio from 1 is the current error of all ratios on this machine. The
    workload is a small training step, which mostly reads and writes weights, because the two do not
    share weights.
    """
    if not settings.takes_part(NATIVE):
        return
    workload = next(mlp_training(settings))
    comparison, _ = compare(workload, settings, watch, (BY_NAME[NATIVE], TWIN))
    yield comparison
    figure = paired_figure(comparison, NATIVE, TWIN.name)
    if figure is not None:
        yield figure

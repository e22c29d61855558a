"""The models whose traffic is counted: two blocks each of what people train and serve."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.models import more_blocks as more
from tests.models.blocks import (
    MLP,
    Block,
    Gathered,
    Head,
    LlamaBlock,
    Residual,
    SequenceParallel,
    T5Block,
    UNetBlock,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the size of its input.

    Attributes:
        about: What it is, in a few words.
        build: Makes the model, on the default device.
        shape: Of its input, float32.
        num_words: If it takes targets too, of how many classes.
        num_ranks: If it talks to other processes, how many there are, itself counted.
    """

    about: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_words: int = 0
    num_ranks: int = 0


def _two(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(build(), build())


CASES = {
    "mlp": Case("MLP 4096, 8k rows", lambda: MLP(4096), (8192, 4096)),
    "decode": Case("MLP 4096, 16 rows", lambda: MLP(4096), (16, 4096)),
    "gpt2": Case(
        "GPT-2 d768, 8x1024", _two(lambda: Block(768, 12, is_causal=True)), (8, 1024, 768)
    ),
    "llama": Case("Llama d2048, 8x1024", _two(lambda: LlamaBlock(2048, 16, 5632)), (8, 1024, 2048)),
    "vit": Case("ViT d768, 64x197", _two(lambda: Block(768, 12, is_causal=False)), (64, 197, 768)),
    "t5": Case("T5 d1024, 16x512", _two(lambda: T5Block(1024, 16, 2816, 512)), (16, 512, 1024)),
    "head": Case(
        "cross entropy head, 50k", lambda: Head(768, 50304), (8, 1024, 768), num_words=50304
    ),
    "resnet": Case("ResNet c128, 128x28x28", _two(lambda: Residual(128)), (128, 128, 28, 28)),
    "unet": Case("U-Net c320, 8x64x64", _two(lambda: UNetBlock(320)), (8, 320, 64, 64)),
    "experts": Case(
        "experts (Mixtral) d1024, 4x1024",
        _two(lambda: more.Experts(1024, 3584, 8)),
        (4, 1024, 1024),
    ),
    "few": Case("the same, 128 tokens", _two(lambda: more.Experts(1024, 3584, 8)), (1, 128, 1024)),
    "dit": Case("DiT d1152, 16x256", _two(lambda: more.DiffusionBlock(1152, 16)), (16, 256, 1152)),
    "mamba": Case(
        "Mamba2 d1024, 4x2048", _two(lambda: more.StateSpace(1024, 32, 128)), (4, 2048, 1024)
    ),
    "whisper": Case(
        "Whisper d1024, 8x3000 frames", lambda: more.Speech(1024, 16, 448), (8, 80, 3000)
    ),
    "dlrm": Case(
        "DLRM d64, 16k rows",
        lambda: more.Recommender(100_000, 64, 1024),
        (16384, 26, 1),
        num_words=100_000,
    ),
    "standardized": Case(
        "standardised weights c256, 32x28x28",
        _two(lambda: more.Standardized(256)),
        (32, 256, 28, 28),
    ),
    "gathered": Case(
        "weights gathered, d2048, 4x1024, 8 ranks",
        _two(lambda: Gathered(2048, 8)),
        (4096, 2048),
        num_ranks=8,
    ),
    "sequence": Case(
        "sequence parallel, d2048, 8x1024, 8 ranks",
        _two(lambda: SequenceParallel(2048, 8)),
        (1024, 2048),
        num_ranks=8,
    ),
}


class AddsItsNorm(nn.Linear):
    """Its weight is read low by the product, and in float32 by a kernel that adds up squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product, and the norm of its weight."""
        out: torch.Tensor = super().forward(x) + self.weight.norm()
        return out


TINY = {
    "product": Case("one product", lambda: nn.Linear(64, 64, bias=False), (32, 64)),
    "norm": Case("adds its norm", lambda: AddsItsNorm(256, 256, bias=False), (256, 256)),
    "mlp": Case("MLP 64, 32 rows", lambda: MLP(64), (32, 64)),
    "llama": Case("Llama d32, 2x16", _two(lambda: LlamaBlock(32, 2, 64)), (2, 16, 32)),
    "resnet": Case("ResNet c32, 2x8x8", _two(lambda: Residual(32)), (2, 32, 8, 8)),
    "unet": Case("U-Net c32, 2x8x8", _two(lambda: UNetBlock(32)), (2, 32, 8, 8)),
    "gathered": Case(
        "weights gathered, d32, 2 ranks", _two(lambda: Gathered(32, 2)), (16, 32), num_ranks=2
    ),
}
"""Models whose bytes are known by hand, and small ones to try the harness."""

"""Generates text token by token with a cache of keys and values.

Each contender has a copy of the same weights and decodes greedily. Contenders alternate per text,
not per token, so that data of a contender stays in the processor's caches as on a server. Each
contender compiles with empty compile caches.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from amp_fx.demo.train import empty_caches, wait_for
from amp_fx.front.compile import compile as compile_low

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from amp_fx.demo.models import GPT, Block
    from amp_fx.demo.train import DemoSettings

TEXTS = 5
"""Number of times that each contender generates the text after the first time."""


class NextToken(nn.Module):
    """One decoding step of a trained model, with a fixed cache size so that it compiles once.

    Processes the prompt one token at a time as well.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self._blocks = cast("list[Block]", list(model.blocks))

    def forward(self, token: Tensor, position: Tensor, cache: Sequence[Tensor]) -> Tensor:
        """Returns the most likely next token, int64 of shape ``(1, 1)``.

        Args:
            token: The current token, shape ``(1, 1)``.
            position: Its position in the text, shape ``(1,)``.
            cache: Keys and values of each block, shape ``(2, 1, heads, context, width/heads)``,
                which are updated in place.
        """
        model = self.model
        x = model.token(token) + model.position[position]
        for block, block_cache in zip(self._blocks, cache, strict=True):
            mixed = _attend(block, block.attention_norm(x), position, block_cache)
            x = x + block.attention_out(mixed)
            x = x + block.mlp(x)
        return F.linear(model.norm(x), model.token.weight).argmax(-1)


def _attend(block: Block, x: Tensor, position: Tensor, cache: Tensor) -> Tensor:
    q, k, v = block.qkv(x).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    cache[0].index_copy_(2, position, k)
    cache[1].index_copy_(2, position, v)
    mask = (torch.arange(cache.shape[3], device=x.device) <= position)[None, None, None]
    mixed = F.scaled_dot_product_attention(q, cache[0], cache[1], mask)
    return mixed.transpose(1, 2).flatten(2)


@dataclasses.dataclass
class Writing:
    """Text of one contender, and the seconds per token."""

    name: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_step: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> float:
        """Median seconds per token."""
        return statistics.median(self.times)

    def num_alike(self, other: Writing) -> int:
        """Returns the length of the common prefix of two texts."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.tokens))


@dataclasses.dataclass
class Writer:
    """A compiled decoding step with its cache and region."""

    writing: Writing
    step: Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
    region: Callable[[], contextlib.AbstractContextManager[Any]]
    cache: list[Tensor]

    @torch.no_grad()
    def write(self, prompt: Sequence[int]) -> list[float]:
        """Generates the whole text; returns the seconds of each call."""
        context, device = self.cache[0].shape[3], self.cache[0].device
        positions = [torch.tensor([i], device=device) for i in range(context)]
        tokens, times = list(prompt), []
        for i in range(context - 1):
            token = torch.tensor([[tokens[i]]], device=device)
            start = time.perf_counter()
            with self.region():
                next_token = self.step(token, positions[i], self.cache).item()
            wait_for(device)
            times.append(time.perf_counter() - start)
            if i + 1 == len(tokens):
                tokens.append(int(next_token))
        self.writing.tokens = tokens
        return times


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of all contenders."""

    float32: Writing
    amp_fx: Writing
    autocast: Writing
    num_given: int

    @property
    def writings(self) -> tuple[Writing, Writing, Writing]:
        """The texts in the order in which the contenders alternate."""
        return (self.float32, self.amp_fx, self.autocast)


def generate(
    model: GPT,
    prompt: Sequence[int],
    settings: DemoSettings,
    on_text: Callable[[Writing], None] | None = None,
) -> Texts:
    """Generates a text with the length of the model's context with each contender.

    Returns:
        The texts with their times.
    """
    writers = _writers(model, settings)
    for number in range(1 + TEXTS):
        for writer in writers:
            with empty_caches() if number == 0 else contextlib.nullcontext():
                times = writer.write(prompt)
            if number == 0:
                writer.writing.first_step = times[0]
            else:
                writer.writing.times += times
            if on_text is not None:
                on_text(writer.writing)
    float32, amp_fx, autocast = (writer.writing for writer in writers)
    return Texts(float32, amp_fx, autocast, len(prompt))


def _writers(model: GPT, settings: DemoSettings) -> tuple[Writer, Writer, Writer]:
    device_type, low, compiler = settings.device.type, settings.dtype, settings.compiler
    size = settings.size
    shape = (2, 1, size.heads, size.context, size.width // size.heads)

    def writer(
        name: str,
        dtype: torch.dtype,
        compile_step: Callable[[nn.Module], Any],
        region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Writer:
        step = compile_step(NextToken(copy.deepcopy(model)).eval())
        cache = [torch.zeros(shape, dtype=dtype, device=settings.device) for _ in model.blocks]
        return Writer(Writing(name), step, region, cache)

    native = functools.partial(torch.compile, backend=compiler, fullgraph=True)
    options = {"compiler": compiler}
    with_amp_fx = functools.partial(
        compile_low, device_type=device_type, dtype=low, fullgraph=True, options=options
    )
    return (
        writer("float32", torch.float32, native),
        writer("amp_fx", low, with_amp_fx),
        writer("torch.autocast", low, native, functools.partial(torch.autocast, device_type, low)),
    )

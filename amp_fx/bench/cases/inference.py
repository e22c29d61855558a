"""Compares inference with other packages that run float32 PyTorch models on a CPU.

Models of transformers and timm are built with random weights if the packages are installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.bench.cases.models import gpt_decode
from amp_fx.bench.compare import compare
from amp_fx.bench.contenders import (
    AMP_FX,
    NATIVE,
    NATIVE_FROZEN,
    NATIVE_TUNED,
    OPENVINO,
    TUNED,
    ZENTORCH,
    Workload,
    contenders_of,
)
from amp_fx.bench.timing import THREADS, threads
from amp_fx.demo.models import GPT, MLP, ResNet, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Comparison, Figure, Watch
    from amp_fx.bench.settings import Settings

NAMES = (NATIVE, NATIVE_FROZEN, NATIVE_TUNED, AMP_FX, TUNED, ZENTORCH, OPENVINO)


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Compares the contenders for inference, with 1 and with 2 threads."""
    for num_threads in THREADS:
        suffix = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
        for workload in workloads(settings):
            named = dataclasses.replace(workload, name=f"{workload.name}, {suffix}")
            contenders = [c for c in contenders_of(named, settings) if c.name in NAMES]
            with threads(num_threads):
                comparison, figures = compare(named, settings, watch, contenders)
            yield comparison
            yield from figures


def workloads(settings: Settings) -> Iterator[Workload]:
    """Yields the models: first those limited by memory bandwidth, last those by compute."""
    yield from gpt_decode(settings)
    if importlib.util.find_spec("transformers"):
        yield _llama(settings)
    for usual, depth, batch in ((1024, 6, 1), (4096, 2, 4)):
        width = settings.pick(tiny=16, cpu=usual)
        x = torch.randn(batch, width, device=settings.device)
        yield Workload(
            f"Linear({width}) x{depth}, batch {batch}", functools.partial(MLP, width, depth), (x,)
        )
    yield _prefill(settings)
    yield _encoder(settings)
    if importlib.util.find_spec("transformers"):
        yield _bert(settings)
    side = settings.pick(tiny=32, cpu=224)
    image = torch.randn(1, 3, side, side, device=settings.device)
    depth = settings.pick(tiny=1, cpu=2)
    resnet = functools.partial(ResNet, settings.pick(tiny=4, cpu=64), depth, 1000)
    yield Workload(f"ResNet-18 shape, 1 image of {side}", resnet, (image,))
    if importlib.util.find_spec("timm") and not settings.tiny:
        for name in ("vit_small_patch16_224", "resnet50"):
            yield Workload(f"timm {name}", functools.partial(_timm, name), (image,))


def _prefill(settings: Settings) -> Workload:
    size = Size(
        width=settings.pick(tiny=16, cpu=768),
        depth=settings.num_layers(12),
        heads=settings.pick(tiny=2, cpu=12),
        context=settings.pick(tiny=8, cpu=128),
    )
    num_tokens = settings.pick(tiny=64, cpu=50257)
    tokens = torch.randint(num_tokens, (1, size.context), device=settings.device)
    name = f"{size.depth} layers of {size.width}, {size.context} tokens at once"
    return Workload(name, functools.partial(GPT, num_tokens, size), (tokens,))


def _encoder(settings: Settings) -> Workload:
    width, depth = settings.pick(tiny=16, cpu=192), settings.num_layers(6)
    x = torch.randn(4, settings.pick(tiny=4, cpu=64), width, device=settings.device)
    name = f"nn.TransformerEncoder, {depth} layers of {width}, 4 x {x.shape[1]} tokens"
    return Workload(name, functools.partial(_build_encoder, width, depth), (x,))


def _build_encoder(width: int, depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, depth)


def _bert(settings: Settings) -> Workload:
    width, depth = settings.pick(tiny=16, cpu=768), settings.num_layers(12)
    length = settings.pick(tiny=4, cpu=128)
    tokens = torch.randint(1000, (1, length), device=settings.device)
    name = f"BERT shape, {depth} layers of {width}, {length} tokens"
    return Workload(name, functools.partial(Bert, width, depth), (tokens,))


class Bert(nn.Module):
    """The encoder of transformers' BERT."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the last hidden states, ``(batch, tokens, width)``."""
        states: torch.Tensor = self.bert(tokens).last_hidden_state
        return states


def _llama(settings: Settings) -> Workload:
    """Returns a workload with two layers and half of the vocabulary of Llama 3.2 1B."""
    width, depth = settings.pick(tiny=64, cpu=2048), settings.num_layers(2)
    num_tokens = settings.pick(tiny=64, cpu=64000)
    past = torch.randn(depth, 2, 1, width // 256 or 1, 128, 64, device=settings.device)
    token = torch.zeros(1, 1, dtype=torch.long, device=settings.device)
    per_layer = width * (2 * width + 2 * 64 * past.shape[3] + 3 * 4 * width)
    return Workload(
        f"Llama shape, {depth} layers of {width}, 128 tokens before",
        functools.partial(Llama, width, depth, num_tokens),
        (token, past),
        has_low_inputs=True,
        weight_bytes=2 * (depth * per_layer + num_tokens * width),
    )


class Llama(nn.Module):
    """transformers' Llama, which decodes one token with a given key-value cache."""

    def __init__(self, width: int, depth: int, num_tokens: int) -> None:
        super().__init__()
        self.transformers: Any = importlib.import_module("transformers")
        config = self.transformers.LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 256 or 1,
            intermediate_size=4 * width,
            tie_word_embeddings=True,
        )
        self.llama = self.transformers.LlamaForCausalLM(config)

    def forward(self, token: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next token."""
        cache = self.transformers.DynamicCache()
        for layer, (key, value) in enumerate(past.unbind()):
            cache.update(key, value, layer)
        logits: torch.Tensor = self.llama(token, past_key_values=cache, use_cache=True).logits
        return logits


def _timm(name: str) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(name)
    return model

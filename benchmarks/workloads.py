"""The models of the benchmark, with random weights and without dropout."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.contenders import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MICRO_BATCHES = (1, 4, 16)
"""Numbers of backward passes per update, in cases that measure the effect of cached casts."""
NUM_PAST = 128
"""Number of cached positions to which a decoded token attends."""


class Model(nn.Module):
    """Calls a model, with a forward that contenders can copy.

    Args:
        build: Builds the model.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = build()

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the first tensor of the result, or the cross-entropy loss given targets."""
        out = self.model(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return out if targets is None else F.cross_entropy(out.flatten(0, -2), targets.flatten())


class Decoder(Model):
    """Decodes one token with a given key-value cache."""

    def forward(self, token: torch.Tensor, past: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the logits; ``past`` has the shape ``(layers, 2, 1, heads, positions, 64)``."""
        cache = importlib.import_module("transformers").DynamicCache()
        for layer, (key, value) in enumerate(past.unbind()):
            cache.update(key, value, layer)
        logits: torch.Tensor = self.model(token, past_key_values=cache, use_cache=True).logits
        return logits


def _linear(width: int, depth: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers)


def _encoder(width: int, depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, depth)


def _transformer(family: str, head: str, config: dict[str, Any]) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    configured = getattr(transformers, f"{family}Config")(**config)
    model: nn.Module = getattr(transformers, family + head)(configured)
    return model


def _builder(build: Callable[..., nn.Module], *args: object) -> Callable[[], nn.Module]:
    """Returns a function that builds a ``Model``, and that another process can unpickle."""
    return functools.partial(Model, functools.partial(build, *args))


def mlp() -> Iterator[Workload]:
    """Inference of a deep and a wide MLP, batch 1 and 4."""
    for width, depth in ((1024, 6), (4096, 2)):
        for batch in (1, 4):
            name = f"Linear({width}) x{depth}, batch {batch}"
            yield Workload(name, _builder(_linear, width, depth), (torch.randn(batch, width),))


def mlp_train() -> Iterator[Workload]:
    """Fused AdamW steps of 1, 4 and 16 micro-batches of an MLP."""
    inputs = torch.randn(32, 512), torch.randint(512, (32,))
    for number in MICRO_BATCHES:
        name = f"Linear(512) x9, {number} micro-batches of 32"
        yield Workload(name, _builder(_linear, 512, 9), inputs, number)


GPT2_SMALL = functools.partial(_transformer, "GPT2", "LMHeadModel", {})
LLAMA = {
    "vocab_size": 64000,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}


def gpt_decode() -> Iterator[Workload]:
    """One token of GPT-2 small after 128 others."""
    inputs = torch.zeros(1, 1).long(), torch.randn(12, 2, 1, 12, NUM_PAST, 64)
    yield Workload(
        "GPT-2 small", functools.partial(Decoder, GPT2_SMALL), inputs, has_low_inputs=True
    )


def llama_decode() -> Iterator[Workload]:
    """One token after 128 others, two layers and half of the vocabulary of Llama 3.2 1B."""
    model = functools.partial(_transformer, "Llama", "ForCausalLM", LLAMA)
    inputs = torch.zeros(1, 1).long(), torch.randn(2, 2, 1, 8, NUM_PAST, 64)
    name = "Llama, 2 layers of 2048"
    yield Workload(name, functools.partial(Decoder, model), inputs, has_low_inputs=True)


def gpt_prefill() -> Iterator[Workload]:
    """128 tokens at once of GPT-2 small."""
    tokens = torch.randint(1000, (1, 128))
    yield Workload("GPT-2 small, 128 tokens", functools.partial(Model, GPT2_SMALL), (tokens,))


def bert() -> Iterator[Workload]:
    """128 tokens at once of BERT base."""
    build = _builder(_transformer, "Bert", "ForSequenceClassification", {})
    yield Workload("BERT base, 128 tokens", build, (torch.randint(1000, (1, 128)),))


def encoder() -> Iterator[Workload]:
    """Inference of a small nn.TransformerEncoder."""
    yield Workload(
        "6 layers of 192, 4 x 64 rows", _builder(_encoder, 192, 6), (torch.randn(4, 64, 192),)
    )


def gpt_train() -> Iterator[Workload]:
    """Fused AdamW steps of 1, 4 and 16 micro-batches of a GPT of 4 layers."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, **dropout}
    tokens = torch.randint(4096, (2, 64))
    for number in MICRO_BATCHES:
        name = f"4 layers of 256, {number} micro-batches of 2 x 64 tokens"
        build = _builder(_transformer, "GPT2", "LMHeadModel", config)
        yield Workload(name, build, (tokens, tokens), number)


def conv() -> Iterator[Workload]:
    """ResNet-18: inference of one image of 224 pixels and one of 64, training."""
    config = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    build = _builder(_transformer, "ResNet", "ForImageClassification", config)
    for side in (224, 64):
        yield Workload(f"1 image of {side}", build, (torch.randn(1, 3, side, side),))
    inputs = torch.randn(4, 3, 64, 64), torch.zeros(4).long()
    yield Workload("training, 4 images of 64", build, inputs, 1)


def vit() -> Iterator[Workload]:
    """A small vision Transformer: inference, training."""
    config = {
        "image_size": 64,
        "patch_size": 8,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_attention_heads": 3,
        "num_hidden_layers": 6,
    }
    build = _builder(_transformer, "ViT", "ForImageClassification", config)
    inputs = torch.randn(4, 3, 64, 64), torch.zeros(4).long()
    yield Workload("6 layers of 192, 4 images of 64", build, inputs[:1])
    yield Workload("training, 6 layers of 192, 4 images of 64", build, inputs, 1)


TINY = ((8, 4), (16, 16), (32, 4), (32, 64), (48, 16), (64, 1), (64, 16), (96, 128))
"""Widths and rows: on both sides of the sizes from which ATen calls oneDNN."""
SWEPT_WIDTHS, SWEPT_ROWS = (4, 8, 16, 24, 32, 48, 64, 96), (1, 4, 16, 64, 256)


def tiny() -> Iterator[Workload]:
    """Inference of 12 layers that are so small that starting a kernel is most of the time."""
    return itertools.starmap(_tiny_layers, TINY)


def tiny_sweep() -> Iterator[Workload]:
    """The layers of `tiny` in 40 sizes, widths 4 to 96 and 1 to 256 rows; only if named."""
    return itertools.starmap(_tiny_layers, itertools.product(SWEPT_WIDTHS, SWEPT_ROWS))


def _tiny_layers(width: int, rows: int) -> Workload:
    name = f"Linear({width}) x12, {rows} rows"
    return Workload(name, _builder(_linear, width, 12), (torch.randn(rows, width),))


def calls() -> Iterator[Workload]:
    """The overhead of a call: inference with 2 and 300 small weights, in three ways."""
    for depth in (1, 150):
        name = f"Linear(8) x{depth}"
        x = torch.randn(1, 8)
        yield Workload(name, _builder(_linear, 8, depth), (x,), compares_calls=True)


ALL = (mlp, mlp_train, gpt_decode, gpt_prefill, gpt_train, llama_decode, bert, encoder, conv, vit)
CASES = {f.__name__.replace("_", "-"): f for f in (*ALL, tiny, calls, tiny_sweep)}
BY_DEFAULT = tuple(name for name, case in CASES.items() if case is not tiny_sweep)

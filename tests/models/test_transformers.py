"""Models that read dtypes in Python, from ``transformers``, against eager autocast, in bits.

Small random configurations. Where Dynamo takes another branch than the eager program by
itself (Mixtral's experts, Mamba's scan), ``torch.compile(backend="eager")`` under autocast
is what counts.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(3, 60, (2, length))


def mask(*, left: bool) -> torch.Tensor:
    """The first row is padded: ``finfo(dtype).min`` goes into its attention scores."""
    row = [0] * 2 + [1] * 6
    return torch.tensor([row if left else row[::-1], [1] * 8])


def make(model: str, config: str, **settings: Any) -> Any:
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    model = make("LlamaForCausalLM", "LlamaConfig", **TEXT, num_key_value_heads=2)
    return model, {"input_ids": tokens(), "attention_mask": mask(left=True)}


def bert() -> tuple[Any, dict[str, torch.Tensor]]:
    model = make("BertForMaskedLM", "BertConfig", **TEXT, **NO_DROPOUT)
    return model, {"input_ids": tokens(), "attention_mask": mask(left=False)}


def gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = make("GPT2LMHeadModel", "GPT2Config", **settings, **dropout)
    return model, {"input_ids": tokens(), "attention_mask": mask(left=True)}


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    model = make(
        "ViTForImageClassification", "ViTConfig", **SIZES, **NO_DROPOUT, image_size=16, patch_size=4
    )
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = make(
        "T5ForConditionalGeneration",
        "T5Config",
        **settings,
        vocab_size=64,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    attended = mask(left=False)
    return model, {"input_ids": tokens(), "attention_mask": attended, "labels": tokens(6)}


def whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = make(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **sides,
        **special,
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
    )
    return model, {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(6)}


def mixtral() -> tuple[Any, dict[str, torch.Tensor]]:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = make("MixtralForCausalLM", "MixtralConfig", **TEXT, **experts, num_key_value_heads=2)
    return model, {"input_ids": tokens()}


def mamba() -> tuple[Any, dict[str, torch.Tensor]]:
    settings = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    return make("MambaForCausalLM", "MambaConfig", **settings), {"input_ids": tokens()}


MODELS = {build.__name__: build for build in (llama, bert, gpt2, vit, t5, whisper, mixtral, mamba)}

WITHIN = {("mamba", "bare"): 0.1}
"""Mamba casts activations to ``hidden_states.dtype``. Without a region Dynamo captures that as
float32, so that less is rounded than in eager autocast: relative to the largest value."""


def step(
    program: Callable[..., Any], module: Any, inputs: Any, dtype: Any, *, training: bool
) -> list[torch.Tensor]:
    """Logits, and gradients when training; only the forward is in a region."""
    region = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with torch.set_grad_enabled(training), region:
        logits: torch.Tensor = program(**inputs).logits
    if not training:
        return [logits]
    torch.autograd.backward(logits.float().square().mean())
    return [logits.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("way", ["ambient", "compile", "bare"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", MODELS)
def test_against_eager_autocast(name: str, dtype: torch.dtype, training: bool, way: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.config.use_cache = False
    model.train(training)
    subjects = [copy.deepcopy(model) for _ in range(3)]

    references = [
        step(program, subject, inputs, dtype, training=training)
        for subject, program in (
            (subjects[0], subjects[0]),
            (subjects[1], torch.compile(subjects[1], backend="eager")),
        )
    ]
    torch._dynamo.reset()
    options: Any = {"compiler": "eager"}
    ours: Any
    if way == "compile":
        ours = amp_fx.compile(subjects[2], dtype=dtype, options=options)
    elif way == "bare":
        ours = torch.compile(subjects[2], backend="amp_fx", options=options | {"dtype": dtype})
    else:
        ours = torch.compile(subjects[2], backend="amp_fx", options=options)
    region = dtype if way == "ambient" else None
    actual = step(ours, subjects[2], inputs, region, training=training)

    expected = next((r for r in references if is_equal(actual, r)), references[-1])
    assert actual[0].dtype == (torch.float32 if way == "bare" else expected[0].dtype)
    tolerance = WITHIN.get((name, way), 0.0)
    for got, want in zip(actual, expected, strict=True):
        assert torch.isfinite(got).all()
        scale = want.float().abs().max().item()
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=tolerance * scale)


def is_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


STORED = {"llama": 15, "bert": 26, "gpt2": 16, "vit": 28, "t5": 32}
"""How many weights are stored: those of linear layers and convolutions that are not tied."""


@pytest.mark.parametrize("name", STORED)
def test_stored_low_they_give_the_bits_that_they_gave(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.config.use_cache = False
    model.eval()

    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="amp_fx", options={"compiler": "eager"})
        ways: tuple[Any, ...] = (model, compiled)
        return [
            step(way, model, inputs, torch.bfloat16, training=False)[0].detach() for way in ways
        ]

    expected = run()
    report = amp_fx.store_low(model)(**inputs)
    assert len(report.stored) == STORED[name]
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)

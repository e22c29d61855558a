"""Small models of ``transformers`` with random weights, with what their loss is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64}
LLAMA = {**TEXT, "num_key_value_heads": 2}
BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

Inputs = dict[str, torch.Tensor]


def text(length: int = 12) -> Inputs:
    ids = torch.randint(3, 60, (2, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def images() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def decoded() -> Inputs:
    return {"input_ids": torch.randint(3, 60, (2, 9)), "labels": torch.randint(3, 60, (2, 7))}


def sounds() -> Inputs:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 60, (2, 7))}


MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Inputs]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 8}, text),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, text),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, text),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
        text,
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, text),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, text),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64},
        text,
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 32}, text),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, **SPECIAL}, decoded),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**BART, **SPECIAL, "d_model": 32, "vocab_size": 64},
        decoded,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE, images),
    "deit": ("DeiTForImageClassification", "DeiTConfig", IMAGE, images),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 1.0},
        images,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        images,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BART,
            **SPECIAL,
            "vocab_size": 64,
            "num_mel_bins": 8,
            "d_model": 32,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
        sounds,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        text,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        text,
    ),
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**TEXT, "num_hidden_layers": 3, "embedding_size": 32},
        text,
    ),
}


def build(name: str) -> tuple[Any, Inputs]:
    """Returns a model in training mode, and inputs with labels."""
    model, config, settings, inputs = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = False
    given = inputs()
    if name == "mamba":
        del given["attention_mask"]
    return made.train(), given

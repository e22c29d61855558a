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
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
} | {**SPECIAL, "d_model": 32, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
STAGES = {"hidden_sizes": [8, 16], "depths": [2, 2]}

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


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "llama": ("LlamaForCausalLM", LLAMA, text),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 8}, text),
    "phi": ("PhiForCausalLM", TEXT, text),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT, text),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, text),
    "gpt2": ("GPT2LMHeadModel", GPT2, text),
    "bert": ("BertForMaskedLM", TEXT, text),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, text),
    "electra": ("ElectraForMaskedLM", {**TEXT, "embedding_size": 32}, text),
    "t5": ("T5ForConditionalGeneration", {**T5, **SPECIAL}, decoded),
    "bart": ("BartForConditionalGeneration", BART, decoded),
    "vit": ("ViTForImageClassification", IMAGE, images),
    "deit": ("DeiTForImageClassification", IMAGE, images),
    "convnext": (
        "ConvNextForImageClassification",
        {**STAGES, "num_stages": 2, "layer_scale_init_value": 1.0},
        images,
    ),
    "resnet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 8}, images),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        sounds,
    ),
    "mamba": ("MambaForCausalLM", MAMBA, text),
    "mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        text,
    ),
    "albert": ("AlbertForMaskedLM", {**TEXT, "num_hidden_layers": 3, "embedding_size": 32}, text),
}


def build(name: str) -> tuple[Any, Inputs]:
    """Returns a model in training mode, and inputs with labels."""
    kind, settings, inputs = MODELS[name]
    model = getattr(transformers, kind)
    made = model(model.config_class(**settings))
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = False
    given = inputs()
    if name == "mamba":
        del given["attention_mask"]
    return made.train(), given

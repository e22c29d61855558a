"""Models of ``transformers``: ``generate`` with a cache, against a forward in training mode.

Random weights. Prompts of several lengths are padded on the left; every logit of the new tokens is
compared with those of each sequence alone, without padding, with gradients and with two threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import csrc

if TYPE_CHECKING:
    from collections.abc import Iterator

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(csrc.load_rows() is None, reason="needs a C++ compiler"),
]

LENGTHS = (37, 20, 53, 4, 6, 2, 7, 1)
NEW = 6
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None}
TEXT = {
    **SPECIAL,
    "bos_token_id": None,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **SPECIAL,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 64,
            "n_positions": 128,
            "bos_token_id": None,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**TEXT, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, **EXPERTS, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **SPECIAL,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 1,
        },
    ),
}


@pytest.fixture(autouse=True)
def _many_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def build(name: str, numerics: str) -> Any:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, config, sizes = FAMILIES[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # so that attention is not uniform
    options: dict[str, Any] = {"compiler": "aot_eager", "numerics": numerics}
    parts = [made, made.encoder] if made.config.is_encoder_decoder else [made]
    for part in parts:
        part.forward = torch.compile(part.forward, backend="amp_fx", options=options, dynamic=True)
    return made


def padded(rows: list[torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    length = max(map(len, rows))
    missing = [length - len(row) for row in rows]
    sides = [(n, 0) if left else (0, n) for n in missing]
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([pad(*pair) for pair in zip(rows, sides, strict=True)]),
        "attention_mask": torch.stack(
            [pad(torch.ones_like(row), side) for row, side in zip(rows, sides, strict=True)]
        ),
    }


def bits_that_differ(model: Any, size: int) -> int:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (n,), generator=generator) for n in LENGTHS[:size]]
    has_encoder = model.config.is_encoder_decoder
    inputs = padded(prompts, left=not has_encoder)
    settings = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=True, **settings)
    generated = torch.stack(out.logits, 1).float()
    new = out.sequences[:, -NEW:]
    texts = [torch.cat(pair) for pair in zip(prompts, new, strict=True)]
    model.train()
    torch.set_num_threads(2)
    count = 0
    try:
        for i, prompt in enumerate(prompts):
            if has_encoder:
                hidden = model.encoder(prompt[None])
                start = out.sequences[i : i + 1, :-1]
                logits = model(encoder_outputs=hidden, decoder_input_ids=start).logits[0]
            else:
                logits = model(input_ids=texts[i][None]).logits[0, len(prompt) - 1 : -1]
            assert logits.requires_grad
            count += int((logits.float() != generated[i]).sum())
        if not has_encoder:
            batch = model(**padded(texts, left=False)).logits.float()
            for i, prompt in enumerate(prompts):
                part = batch[i, len(prompt) - 1 : len(texts[i]) - 1]
                count += int((part != generated[i]).sum())
    finally:
        torch.set_num_threads(1)
        model.eval()
    return count


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_has_the_bits_of_training(name: str) -> None:
    model = build(name, "invariant")
    assert [bits_that_differ(model, size) for size in (1, 3, 8)] == [0, 0, 0]


def test_eager_kernels_give_other_bits() -> None:
    """The control: what the mode is for."""
    assert bits_that_differ(build("llama", "eager"), 3) > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_padded_batch_under_inductor_and_native_strict_as_control(name: str) -> None:
    model, config, sizes = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (n,), generator=generator) for n in (37, 53, 64)]
    batch, length = padded(rows, left=True), 64

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        found: torch.Tensor = made(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=False,
        ).logits
        return found

    def count(backend: str, options: dict[str, Any]) -> int:
        torch.compiler.reset()
        call = torch.compile(forward, backend=backend, options=options, dynamic=False)
        with torch.autocast("cpu", torch.bfloat16):
            whole = call(**batch)
            assert whole.requires_grad
            with torch.no_grad():
                alone = [call(row[None], torch.ones_like(row)[None])[0] for row in rows]
        pairs = zip(alone, whole, strict=True)
        return sum(int((one != all_[length - len(one) :]).sum()) for one, all_ in pairs)

    assert count("amp_fx", {"numerics": "invariant"}) == 0
    assert count("inductor", {"emulate_precision_casts": True}) > 0

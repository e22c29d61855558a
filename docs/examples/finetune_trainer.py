"""Fine-tunes a Hugging Face model with `transformers.Trainer`, compiled by amp_fx.

    python finetune_trainer.py --model gpt2 --steps 100

Without `--model` a tiny GPT-2 with random weights is made, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import transformers

from amp_fx.integrations import TrainerCallback


def make_model(name: str | None) -> Any:
    """A pretrained model by its name, or a tiny one."""
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def main() -> list[float]:
    """Trains; returns the losses that were logged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(args.model)
    rows = [torch.arange(start, start + args.length) for start in range(8)]
    callback = TrainerCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                folder,
                bf16=True,  # the precision is the Trainer's to say; without it all is float32
                max_steps=args.steps,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[callback],
        )
        trainer.train()
    print("compiled:", ", ".join(callback.compiled))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], losses

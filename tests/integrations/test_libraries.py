"""Trainer, Accelerate and Lightning: the one line of each gives the library's own numbers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amp_fx
from amp_fx import integrations

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

EAGER: dict[str, Any] = {"options": {"compiler": "eager"}}


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# Hugging Face's Trainer.


def gpt() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=8, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def train_gpt(folder: Path, model: Any, callbacks: list[Any], **arguments: Any) -> list[float]:
    import transformers

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (24, 8), generator=generator)
    args = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        logging_steps=1, disable_tqdm=True, save_strategy="no", seed=0, **arguments,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arguments", [{"bf16": True}, {}], ids=["bfloat16", "float32"])
def test_trainer(arguments: dict[str, Any], tmp_path: Path) -> None:
    model = gpt()
    expected = train_gpt(tmp_path, copy.deepcopy(model), [], **arguments)
    callback = integrations.TrainerCallback(**EAGER)
    before = num_graphs()
    found = train_gpt(tmp_path, model, [callback], **arguments)
    assert found == expected
    assert len(found) == 3
    assert "transformer.h.0" in callback.compiled
    assert num_graphs() > before


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("weight_cache", "hits_per_value"),
    [pytest.param(True, 0, id="default"), pytest.param("training", 2, id="training")],
)
def test_trainer_caches_only_what_micro_batches_share(
    weight_cache: bool | str, hits_per_value: int, tmp_path: Path
) -> None:
    options = {"compiler": "aot_eager", "weight_cache": weight_cache}
    callback = integrations.TrainerCallback(options=options)
    amp_fx.weight_cache.clear()
    before = amp_fx.weight_cache.stats()
    train_gpt(tmp_path, gpt(), [callback], bf16=True, gradient_accumulation_steps=3)
    stats = amp_fx.weight_cache.stats()
    computed = stats.refreshes - before.refreshes
    assert (computed > 0) == (hits_per_value > 0)
    assert stats.hits - before.hits == hits_per_value * computed


@pytest.mark.slow
def test_trainer_makes_the_model_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    callback = integrations.TrainerCallback(**EAGER)
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, bf16=True, disable_tqdm=True
    )
    row = torch.arange(8)
    data = [{"input_ids": row, "labels": row}] * 2
    trainer = transformers.Trainer(
        args=args, model_init=gpt, train_dataset=data, callbacks=[callback]
    )
    trainer.train()
    assert "transformer.h.1" in callback.compiled


# Accelerate.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def accelerated(precision: str, plugin: Any) -> list[torch.Tensor]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(mixed_precision=precision, cpu=True, dynamo_plugin=plugin)
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize(("precision", "is_regional"), [("bf16", True), ("no", False)])
def test_accelerate(precision: str, is_regional: bool) -> None:
    expected = accelerated(precision, None)
    plugin = integrations.AcceleratePlugin(use_regional_compilation=is_regional, **EAGER)
    before = num_graphs()
    torch.testing.assert_close(accelerated(precision, plugin), expected, rtol=0, atol=0)
    assert num_graphs() > before


def test_accelerate_takes_torchs_own_settings() -> None:
    plugin = integrations.AcceleratePlugin(mode="max-autotune-no-cudagraphs", dynamic=True)
    kwargs = plugin.to_kwargs()
    assert kwargs["backend"] == "amp_fx"
    assert kwargs["options"]["mode"] == "max-autotune-no-cudagraphs"
    assert kwargs["dynamic"] is True
    torch.compile(nn.Linear(2, 2), **kwargs)  # it takes them


@pytest.mark.parametrize("name", ["TrainerCallback", "AcceleratePlugin", "LightningPrecision"])
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    with pytest.raises(amp_fx.errors.OptionError, match="did you mean 'freezing'"):
        getattr(integrations, name)(options={"freezin": False})


@pytest.mark.parametrize("name", ["TrainerCallback", "LightningPrecision"])
def test_a_wrong_argument_is_told_at_once(name: str) -> None:
    with pytest.raises(amp_fx.errors.ArgumentTypeError, match="did you mean 'fullgraph'"):
        getattr(integrations, name)(full_graph=True)


# Lightning.


def lightning_losses(tmp_path: Path, precision: Any) -> list[torch.Tensor]:
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).float().square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    task = Task()
    data = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    where = {"plugins": [precision]} if not isinstance(precision, str) else {"precision": precision}
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **where,
    )  # fmt: skip
    rows: Any = list(data)
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=None))
    return task.losses


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning(precision: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = amp_fx.GradScaler("cpu") if precision == "16-mixed" else None
    plain = MixedPrecision(precision, "cpu", scaler)
    expected = lightning_losses(tmp_path, plain)
    plugin = integrations.LightningPrecision(precision, "cpu", **EAGER)
    before = num_graphs()
    found = lightning_losses(tmp_path, plugin)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert plugin.compiled == ["net.layers.0", "net.layers.1", "net.layers.2"]
    assert num_graphs() > before


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "pass bf16=True"), ({"bf16": True, "torch_compile": True}, "remove it")],
)
def test_arguments_without_effect_are_told(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)
    with pytest.warns(amp_fx.errors.DtypeWarning, match=message):
        transformers.Trainer(nn.Linear(2, 2), args, callbacks=[integrations.TrainerCallback()])


def test_a_model_that_is_compiled_as_a_whole_has_a_name() -> None:
    callback, args = integrations.TrainerCallback(), SimpleNamespace(bf16=True, torch_compile=False)
    callback.on_init_end(args, None, None, model=nn.Linear(2, 2))
    assert callback.compiled == ["Linear"]

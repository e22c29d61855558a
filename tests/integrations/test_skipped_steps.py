"""Libraries see which steps the scaler skipped, with fused optimizers as with others.

The oracle is the optimizer itself: a learning-rate schedule has advanced as often as parameters
have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import integrations

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
OVERFLOWS = (0, 2, 3)
NUM_STEPS = 6


def batch(i: int, overflows: Any = OVERFLOWS) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
    return x * float("inf") if i in overflows else x


class Changes:
    """Counts how often parameters changed."""

    def __init__(self, params: Any) -> None:
        self.params, self.count = list(params), 0
        self.old = [p.detach().clone() for p in self.params]

    def look(self) -> int:
        new = [p.detach().clone() for p in self.params]
        self.count += not all(map(torch.equal, new, self.old))
        self.old = new
        return self.count


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def num_halved(scheduler: Any) -> int:
    """How often the rate was halved."""
    (rate,) = scheduler.get_last_lr()
    return round(torch.log2(torch.tensor(0.1 / rate)).item())


@pytest.fixture(autouse=True)
def _torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores ``torch.compile``, which Lightning wraps when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_loop_with_two_optimizers(name: str, clips: bool) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    overflows = [OVERFLOWS, (1, 3)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    schedulers = [halving(optimizer) for optimizer in optimizers]
    changes = [Changes(model.parameters()) for model in models]
    scaler = amp_fx.GradScaler("cpu")
    assert not scaler.last_step_of(optimizers[0]).skipped
    for i in range(NUM_STEPS):
        for model, optimizer, bad in zip(models, optimizers, overflows, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(batch(i, bad)).square().mean()).backward()
            if clips:
                scaler.unscale_and_clip_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        for scheduler, change in zip(schedulers, changes, strict=True):
            if not scaler.last_step_of(scheduler.optimizer).skipped:
                scheduler.step()
            assert num_halved(scheduler) == change.look()
    assert [change.count for change in changes] == [NUM_STEPS - len(bad) for bad in overflows]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_prepared_before", [False, True])
def test_accelerate(name: str, is_prepared_before: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = amp_fx.GradScaler("cpu")
    models, overflows = [nn.Linear(3, 2), nn.Linear(3, 2)], [OVERFLOWS, (1,)]
    rows = []
    for model in models:
        optimizer = OPTIMIZERS[name](model.parameters())
        if is_prepared_before:
            prepared, optimizer = accelerator.prepare(model, optimizer)
            scheduler = accelerator.prepare(halving(optimizer.optimizer))
        else:
            prepared, optimizer, scheduler = accelerator.prepare(
                model, optimizer, halving(optimizer)
            )
        rows.append((prepared, optimizer, scheduler, Changes(model.parameters())))
    for i in range(NUM_STEPS):
        for (model, optimizer, scheduler, change), bad in zip(rows, overflows, strict=True):
            optimizer.zero_grad()
            accelerator.backward(model(batch(i, bad)).square().mean())
            optimizer.step()
            scheduler.step()
            assert optimizer.step_was_skipped == (i in bad)
            assert num_halved(scheduler) == change.look()
    assert [row[-1].count for row in rows] == [NUM_STEPS - len(bad) for bad in overflows]


def with_fabric(scaler: Any, model: Any, optimizer: Any) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(model, optimizer)
    for i in range(5):
        optimizer.zero_grad()
        fabric.backward(model(batch(i, (1,))).square().mean())
        if i != 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()


def with_accelerate(scaler: Any, model: Any, optimizer: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(model, optimizer)
    for i in range(5):
        optimizer.zero_grad()
        accelerator.backward(model(batch(i, (1,))).square().mean())
        optimizer.step()
        assert optimizer.step_was_skipped == (i == 1)


@pytest.mark.parametrize("trainer", [with_fabric, with_accelerate])
def test_numbers_are_those_of_torchs_scaler(trainer: Any) -> None:
    results = []
    for scaler in (amp_fx.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        trainer(scaler, model, OPTIMIZERS["adamw"](model.parameters()))
        results.append([*model.parameters(), torch.tensor(scaler.get_scale())])
    assert results[0][-1].item() < 2.0**16
    torch.testing.assert_close(*results, rtol=0, atol=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_trainer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import transformers

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=NUM_STEPS, per_device_train_batch_size=4, report_to=[], optim=name,
        use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=0.1, max_grad_norm=0,
        logging_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [{"x": row} for i in range(NUM_STEPS) for row in batch(i)]
    net = Net()
    change, schedule = Changes(net.parameters()), []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            schedule.append(kwargs["lr_scheduler"].last_epoch)
            assert schedule[-1] == change.look()

    trainer = transformers.Trainer(net, args, train_dataset=rows, callbacks=[Look()])
    trainer.accelerator.scaler = amp_fx.GradScaler("cpu")
    trainer.train()
    assert schedule == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lightning(name: str, interval: str) -> None:
    pytest.importorskip("lightning")
    import lightning

    schedule = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)
            self.change = Changes(self.net.parameters())

        def training_step(self, numbers: Any) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch(int(numbers[0]))).float().square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS[name](self.parameters())
            scheduler = {"scheduler": halving(optimizer), "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_train_batch_start(self, *_: Any) -> None:
            schedule.append((num_halved(self.lr_schedulers()), self.change.look()))

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[integrations.LightningPrecision("16-mixed", "cpu", options={"compiler": "eager"})],
    )  # fmt: skip
    task = Task()
    numbers = torch.utils.data.TensorDataset(torch.arange(NUM_STEPS))
    trainer.fit(task, torch.utils.data.DataLoader(numbers, batch_size=None))
    counts = [0, 0, 1, 1, 1, 2]
    assert [changed for _, changed in schedule] == counts
    assert [halved for halved, _ in schedule] == (counts if interval == "step" else [0] * 6)
    assert num_halved(task.lr_schedulers()) == (3 if interval == "step" else 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: amp_fx.GradScaler) -> None:
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(model(batch(i)).square().mean()))
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_run_for_steps_only(name: str, register: str) -> None:
    model, calls = nn.Linear(3, 2), list[Any]()
    optimizer = OPTIMIZERS[name](model.parameters())
    getattr(optimizer, register)(lambda *args: calls.append(args))
    train(model, optimizer, amp_fx.GradScaler("cpu"))
    assert len(calls) == NUM_STEPS - len(OVERFLOWS)


@pytest.mark.parametrize("init_scale", [2.0**16, 1000.0])
def test_numbers_are_those_of_an_optimizer_that_nothing_observes(init_scale: float) -> None:
    results = []
    for is_observed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        scaler = amp_fx.GradScaler("cpu", init_scale=init_scale, growth_interval=1)
        if is_observed:
            optimizer.register_step_post_hook(lambda *_: None)
        train(model, optimizer, scaler)
        results.append([*model.state_dict().values(), torch.tensor(scaler.get_scale())])
    torch.testing.assert_close(*results, rtol=0, atol=0)

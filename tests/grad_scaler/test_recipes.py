"""The recipes of PyTorch's "Automatic Mixed Precision examples", in float16 on the CPU.

Each runs as printed there, with torch's scaler and with ours, on models under eager autocast and
on models that this backend compiled. Weights and scales are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable

autocast = functools.partial(torch.autocast, device_type="cpu", dtype=torch.float16)
NUM_STEPS = 5
OVERFLOWS_AT = 2
INIT_SCALE = 2.0**8  # with which nothing else overflows


class Task:
    """A small model with an optimizer; one of its batches makes gradients overflow."""

    def __init__(self, how: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        if seed == 0:
            self.other = Task(how, 1)
        self.region: Callable[[], contextlib.AbstractContextManager[Any]] = autocast
        if how == "compiled":
            options: Any = {"dtype": torch.float16, "compiler": "eager"}
            self.model = torch.compile(self.model, backend="amp_fx", options=options)
            self.region = contextlib.nullcontext

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)


def batches() -> Any:
    generator = torch.Generator().manual_seed(1)
    for number in range(NUM_STEPS):
        inputs = torch.randn(8, 6, generator=generator)
        targets = torch.randn(8, 3, generator=generator)
        if number == OVERFLOWS_AT:
            targets[0, 0] = math.inf
        yield inputs, targets


def typical_training(task: Task, scaler: Any, max_norm: float = 0.0) -> None:
    for inputs, target in batches():
        task.optimizer.zero_grad()
        with task.region():
            loss = task.loss_fn(task.model(inputs), target)
        scaler.scale(loss).backward()
        if max_norm:
            scaler.unscale_(task.optimizer)
            torch.nn.utils.clip_grad_norm_(task.params, max_norm)
        scaler.step(task.optimizer)
        scaler.update()


def gradient_clipping(task: Task, scaler: Any) -> None:
    typical_training(task, scaler, max_norm=0.1)


def gradient_accumulation(task: Task, scaler: Any) -> None:
    iters_to_accumulate = 2
    for i, (inputs, target) in enumerate(itertools.chain(batches(), batches())):
        with task.region():
            loss = task.loss_fn(task.model(inputs), target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            # may unscale_ here if desired
            scaler.step(task.optimizer)
            scaler.update()
            task.optimizer.zero_grad()


def gradient_penalty(task: Task, scaler: Any) -> None:
    for inputs, target in batches():
        task.optimizer.zero_grad()
        with task.region():
            loss = task.loss_fn(task.model(inputs), target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=task.params, create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with task.region():
            grad_norm = torch.zeros(())
            for grad in grad_params:
                grad_norm += grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        # As printed, but for `inputs`.
        scaler.scale(loss).backward(inputs=task.params)
        scaler.step(task.optimizer)
        scaler.update()


def several_models_losses_and_optimizers(task: Task, scaler: Any) -> None:
    other = task.other
    for inputs, target in batches():
        task.optimizer.zero_grad()
        other.optimizer.zero_grad()
        with task.region():
            output0 = task.model(inputs)
            output1 = other.model(inputs)
            loss0 = task.loss_fn(2 * output0 + 3 * output1, target)
            loss1 = task.loss_fn(3 * output0 - 5 * output1, target.nan_to_num(posinf=1.0))
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        # You can choose which optimizers receive explicit unscaling, if you want to inspect or
        # modify the gradients of the params they own.
        scaler.unscale_(task.optimizer)
        scaler.step(task.optimizer)
        scaler.step(other.optimizer)
        scaler.update()


class MyReLU(torch.autograd.Function):
    """A function that needs float32, as the last recipe has it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, value: Tensor) -> Tensor:
        assert value.dtype is torch.float32
        ctx.save_for_backward(value)
        return value.clamp(min=0)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        value: Tensor
        (value,) = ctx.saved_tensors
        return grad * (value > 0)


def functions_that_need_a_dtype(task: Task, scaler: Any) -> None:
    model = task.model
    task.model = lambda x: MyReLU.apply(model(x))  # type: ignore[no-untyped-call]
    typical_training(task, scaler)


RECIPES = [
    typical_training,
    gradient_clipping,
    gradient_accumulation,
    gradient_penalty,
    several_models_losses_and_optimizers,
]
CASES = [(recipe, how) for recipe in RECIPES for how in ("eager", "compiled")]


def numbers(scaler: Any, task: Task) -> list[Tensor]:
    params = [param.detach().clone() for param in (*task.params, *task.other.params)]
    return [*params, torch.tensor(scaler.get_scale())]


@pytest.mark.parametrize(
    ("recipe", "how"),
    [*CASES, (functions_that_need_a_dtype, "eager")],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_recipe(recipe: Any, how: str) -> None:
    results = []
    for scaler_class in (amp_fx.GradScaler, torch.amp.GradScaler):
        torch._dynamo.reset()
        task, scaler = Task(how), scaler_class("cpu", init_scale=INIT_SCALE)
        before = numbers(scaler, task)
        recipe(task, scaler)
        results.append(numbers(scaler, task))
        assert all(map(torch.isfinite, map(torch.sum, results[-1])))
        has_changed = [not torch.equal(a, b) for a, b in zip(before, results[-1], strict=True)]
        assert all(has_changed[: len(task.params)])  # it learned
        num_overflows = 2 if recipe is gradient_accumulation else 1  # it sees the batches twice
        assert results[-1][-1] == INIT_SCALE / 2**num_overflows
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)

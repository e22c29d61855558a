"""Every optimizer, in every implementation it has, is noticed by a train and an eval graph."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.weights.nets import EVAL, TRAIN, Net, autocast, counted_refreshes, inputs, make_net

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], Any]

NEEDS_CLOSURE = {"LBFGS"}
NEEDS_SPARSE_GRADIENTS = {"SparseAdam"}

OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
    and name not in NEEDS_SPARSE_GRADIENTS
)


def implementations() -> list[tuple[str, str]]:
    """Pairs of an optimizer and an implementation that it takes as an argument."""
    found = []
    for name in OPTIMIZERS:
        allowed = inspect.signature(getattr(torch.optim, name)).parameters
        found += [(name, way) for way in ("foreach", "fused") if way in allowed]
        found.append((name, "default"))
    return found


def make_optimizer(name: str, way: str, net: Net) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.1} if name != "Adafactor" else {"lr": 0.5}
    if way != "default":
        options[way] = True
    # Muon takes matrices only.
    wanted = [p for p in net.parameters() if p.dim() == 2]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(wanted, **options)
    return optimizer


def loss_of(program: Callable[..., torch.Tensor]) -> torch.Tensor:
    return program(inputs()).square().mean()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "way"), implementations())
def test_never_stale_after_a_step(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Calls are right, and do not warn of writes that PyTorch cannot see."""
    net, twin = make_net(), make_net()
    compiled = EVAL.compile(net)
    optimizers = [make_optimizer(name, way, model) for model in (net, twin)]
    before = net.a.weight.detach().clone()
    for _ in range(3):
        TRAIN.check(compiled, net, twin)
        EVAL.check(compiled, net, twin)
        programs: tuple[Any, ...] = (compiled, functools.partial(autocast, twin))
        for optimizer, program in zip(optimizers, programs, strict=True):
            step_with_closure(optimizer, program)
        EVAL.check(compiled, net, twin)
    assert not torch.equal(before, net.a.weight), "the optimizer must have written"
    assert not [record for record in caplog.records if record.name.startswith("amp_fx")]


def step_with_closure(optimizer: torch.optim.Optimizer, program: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(program)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if type(optimizer).__name__ in NEEDS_CLOSURE:
        optimizer.step(closure)  # type: ignore[arg-type]
        return
    closure()
    optimizer.step()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_never_stale_after_a_compiled_step(name: str, backend: str) -> None:
    check_compiled_step(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_never_stale_after_a_step_by_inductor(name: str) -> None:
    check_compiled_step(name, "inductor")


def check_compiled_step(name: str, backend: str) -> None:
    """Loads the weights of each compiled step into the twin, and compares both."""
    net, twin = make_net(), make_net()
    compiled = EVAL.compile(net)
    optimizer = make_optimizer(name, "default", net)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        before = net.a.weight.detach().clone()
        optimizer.zero_grad()
        loss_of(compiled).backward()  # type: ignore[no-untyped-call]
        step()
        assert not torch.equal(before, net.a.weight)
        twin.load_state_dict(net.state_dict())
        EVAL.check(compiled, net, twin)
        TRAIN.check(compiled, net, twin)


def test_steps_inside_the_backward() -> None:
    """A hook that steps as soon as a gradient is there, other weights still being needed."""
    net, twin = make_net(), make_net()
    compiled = EVAL.compile(net)
    for model in (net, twin):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)  # type: ignore[no-untyped-call]
    for _ in range(3):
        loss_of(compiled).backward()  # type: ignore[no-untyped-call]
        loss_of(functools.partial(autocast, twin)).backward()  # type: ignore[no-untyped-call]
        EVAL.check(compiled, net, twin)


def descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.5)
    parameter.grad = None


def test_micro_batches_cast_once() -> None:
    net = make_net()
    compiled = TRAIN.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of(compiled).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with counted_refreshes() as num_refreshes:
        for _ in range(4):
            loss_of(compiled).backward()  # type: ignore[no-untyped-call]
        assert num_refreshes() == 3
        optimizer.step()
        loss_of(compiled)
        assert num_refreshes() == 6

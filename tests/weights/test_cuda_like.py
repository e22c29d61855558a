"""Weights that are written as CUDA writes lists of tensors: every test of writes once more."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.weights.engine import engine
from tests.weights.cuda_like import cuda_like
from tests.weights.nets import (
    EVAL,
    TRAIN,
    Net,
    assert_same,
    autocast,
    compile_amp_fx,
    counted_refreshes,
    inputs,
    make_net,
)
from tests.weights.test_optimizers import (
    OPTIMIZERS,
    loss_of,
    step_with_closure,
    test_accumulated_gradients_are_those_of_eager_autocast,
    test_micro_batches_cast_once,
    test_never_stale_after_a_compiled_step,
    test_never_stale_after_a_step,
    test_never_stale_after_a_step_by_inductor,
    test_steps_inside_the_backward,
)
from tests.weights.test_random_sequences import test_never_stale as test_never_stale_in_sequences
from tests.weights.test_writes import (
    PAIRS,
    check_never_stale,
    test_a_write_noticed_by_one_graph_is_not_hidden_from_another,
    test_copies_are_kept_at_all,
)
from tests.weights.writes import WRITES, other

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Tensors = list[torch.Tensor]
    ListWrite = Callable[[Tensors, int], Any]

__all__ = [
    "test_a_write_noticed_by_one_graph_is_not_hidden_from_another",
    "test_accumulated_gradients_are_those_of_eager_autocast",
    "test_copies_are_kept_at_all",
    "test_micro_batches_cast_once",
    "test_never_stale_after_a_compiled_step",
    "test_never_stale_after_a_step",
    "test_never_stale_after_a_step_by_inductor",
    "test_never_stale_in_sequences",
    "test_steps_inside_the_backward",
]


@pytest.fixture(autouse=True, scope="module")
def _cuda_like() -> Iterator[None]:
    engine().watch_list_ops()  # in Python it is done for accelerators only
    with cuda_like():
        yield


@pytest.mark.parametrize("write", WRITES)
def test_never_stale_after_a_write(write: str) -> None:
    check_never_stale(write, PAIRS[0])


def fresh(tensors: Tensors, i: int) -> list[torch.Tensor]:
    """New tensors in the shapes of others, the same for a model and its twin."""
    return [other(10 * i + k, *tensor.shape) for k, tensor in enumerate(tensors)]


def steps_of(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.ones(()) for _ in tensors]


FUSED: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
FUSED_ADAM: dict[str, Any] = {**FUSED, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
FUSED_SGD: dict[str, Any] = {**FUSED, "momentum": 0.9, "dampening": 0.0, "nesterov": False}


def fused_adam(op: Any, tensors: Tensors, i: int, **options: Any) -> None:
    squares = [t.square() for t in fresh(tensors, i + 2)]
    moments: Any = fresh(tensors, i), fresh(tensors, i + 1), squares, [], steps_of(tensors)
    op(tensors, *moments, **{**FUSED_ADAM, **options})


def fused_sgd(tensors: Tensors, i: int, **options: Any) -> None:
    lists = fresh(tensors, i), fresh(tensors, i + 1)
    torch._fused_sgd_(tensors, *lists, **{**FUSED_SGD, "is_first_step": False, **options})


def fused_adagrad(tensors: Tensors, i: int) -> None:
    sums = [t.square() for t in fresh(tensors, i + 1)]
    lists = fresh(tensors, i), sums, steps_of(tensors)
    torch._fused_adagrad_(tensors, *lists, **FUSED, lr_decay=0.0, eps=1e-8)


LIST_WRITES: dict[str, ListWrite] = {
    "_foreach_mul_": lambda ts, _: torch._foreach_mul_(ts, 1.5),
    "_foreach_mul_tensor": lambda ts, _: torch._foreach_mul_(ts, torch.tensor(1.5)),
    "_foreach_copy_": lambda ts, i: torch._foreach_copy_(ts, fresh(ts, i)),
    "_foreach_lerp_": lambda ts, i: torch._foreach_lerp_(ts, fresh(ts, i), 0.25),
    "_foreach_add_": lambda ts, i: torch._foreach_add_(ts, fresh(ts, i), alpha=0.5),
    "_foreach_addcdiv_": lambda ts, i: torch._foreach_addcdiv_(ts, fresh(ts, i), fresh(ts, i + 1)),
    "_foreach_addcmul_": lambda ts, i: torch._foreach_addcmul_(ts, fresh(ts, i), fresh(ts, i + 1)),
    "_foreach_neg_": lambda ts, _: torch._foreach_neg_(ts),
    "_foreach_zero_": lambda ts, _: torch._foreach_zero_(ts),
    "_foreach_clamp_max_": lambda ts, i: torch._foreach_clamp_max_(ts, 0.5 / (i + 1)),
    "by_its_overload": lambda ts, _: torch.ops.aten._foreach_mul_.Scalar(ts, 1.5),
    "_fused_adamw_": functools.partial(fused_adam, torch._fused_adamw_),
    "_fused_adamw_tensor_lr": functools.partial(
        fused_adam, torch._fused_adamw_, lr=torch.tensor(0.1)
    ),
    "_fused_adam_": functools.partial(fused_adam, torch._fused_adam_),
    "_fused_sgd_": fused_sgd,
    "_fused_sgd_tensor_lr": functools.partial(fused_sgd, lr=torch.tensor(0.1)),
    "_fused_adagrad_": fused_adagrad,
}


def of_data(net: Net) -> list[torch.Tensor]:
    return [p.data for p in net.parameters()]


LISTS: dict[str, Callable[[Net], Tensors]] = {
    "parameters": lambda net: list(net.parameters()),
    "data": of_data,
    "detached": lambda net: [p.detach() for p in net.parameters()],
    "views": lambda net: [p.data.view(-1)[1:] for p in net.parameters()],
    "one": lambda net: [net.b.weight.data],
}


def check_after(change: Callable[[Net, int], Any]) -> None:
    """Calls a train and an eval graph, after each of three changes of model and twin."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    for graph in (TRAIN, EVAL, TRAIN, EVAL):
        graph.check(compiled, net, twin)
    for i in range(3):
        before = net.b.weight.detach().clone()
        for model in (net, twin):
            change(model, i)
        assert not torch.equal(before, net.b.weight) or i > 0, "it must have written"
        for graph in (EVAL, TRAIN)[:: 1 if i % 2 else -1]:
            graph.check(compiled, net, twin)


@pytest.mark.parametrize("write", LIST_WRITES)
@pytest.mark.parametrize("lists", ["parameters", "data"])
def test_never_stale_after_a_write_of_a_list(write: str, lists: str) -> None:
    @torch.no_grad()
    def change(net: Net, i: int) -> None:
        LIST_WRITES[write](LISTS[lists](net), i)

    check_after(change)


@pytest.mark.parametrize("write", ["_foreach_mul_", "_fused_adamw_"])
@pytest.mark.parametrize("lists", ["detached", "views", "one"])
def test_never_stale_after_a_write_of_another_list(write: str, lists: str) -> None:
    @torch.no_grad()
    def change(net: Net, i: int) -> None:
        LIST_WRITES[write](LISTS[lists](net), i)

    check_after(change)


@pytest.mark.parametrize("write", ["_foreach_mul_", "_fused_adamw_"])
@pytest.mark.parametrize("lists", ["parameters", "data"])
def test_never_stale_after_a_write_in_inference_mode(write: str, lists: str) -> None:
    @torch.inference_mode()
    def change(net: Net, i: int) -> None:
        LIST_WRITES[write](LISTS[lists](net), i)

    check_after(change)


@pytest.mark.parametrize("write", ["_foreach_mul_", "_fused_adamw_"])
def test_never_stale_after_a_write_of_a_list_by_a_thread(write: str) -> None:
    def change(net: Net, i: int) -> None:
        thread = threading.Thread(target=LIST_WRITES[write], args=(of_data(net), i))
        thread.start()
        thread.join()

    check_after(change)


@pytest.mark.parametrize("write", ["_foreach_mul_", "_fused_sgd_"])
def test_never_stale_after_a_write_between_two_calls_of_one_forward(write: str) -> None:
    """A list is written inside the compiled program, at a graph break."""
    net, twin = make_net(), make_net()

    def program(model: Net, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = model(x)
        torch._dynamo.graph_break()
        rewrite(model)
        return torch.cat([first, model(x)])

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def rewrite(model: Net) -> None:
        LIST_WRITES[write](of_data(model), 0)

    compiled = compile_amp_fx(program)
    with torch.no_grad():
        for _ in range(4):
            out = compiled(net, inputs())
            # Autocast keeps casts for the length of a region; each graph is one of its own.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                expected = program(twin, inputs())
            assert_same(out, expected.float())


def test_never_stale_with_an_average_of_the_weights() -> None:
    """The average is evaluated by a graph of its own, and swapped in and out of the model."""
    net, twin = make_net(), make_net()
    averages = make_net(1), make_net(1)
    compiled, compiled_average = compile_amp_fx(net), compile_amp_fx(averages[0])
    for i in range(4):
        for model, average in zip((net, twin), averages, strict=True):
            torch._foreach_add_(of_data(model), fresh(of_data(model), i), alpha=0.1)
            torch._foreach_lerp_(of_data(average), of_data(model), 0.5)
        EVAL.check(compiled_average, *averages)
        TRAIN.check(compiled, net, twin)
        kept = [p.clone() for p in of_data(net)]
        for model, average in zip((net, twin), averages, strict=True):
            torch._foreach_copy_(of_data(model), of_data(average))
        EVAL.check(compiled, net, twin)
        for model in (net, twin):
            torch._foreach_copy_(of_data(model), kept)
        TRAIN.check(compiled, net, twin)


def test_clipping_gradients_refreshes_nothing() -> None:
    """It writes lists too, but none of weights."""
    net, twin = make_net(), make_net()
    compiled = TRAIN.compile(net)
    loss_of(compiled).backward()  # type: ignore[no-untyped-call]
    loss_of(functools.partial(autocast, twin)).backward()  # type: ignore[no-untyped-call]
    with counted_refreshes() as num_refreshes:
        for model in (net, twin):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        TRAIN.check(compiled, net, twin)
        EVAL.check(compiled, net, twin)
        assert num_refreshes() == 0


CAPTURABLE = [
    name
    for name in OPTIMIZERS
    if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
]


@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_never_stale_after_a_capturable_step(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(torch.optim, name)
    if way not in inspect.signature(kind).parameters:
        pytest.skip(f"{name} has no {way}")
    for base in kind.__mro__:
        module = inspect.getmodule(base)
        if hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(
                module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"]
            )
    options: dict[str, Any] = {"lr": 0.1, "capturable": True, way: True}
    check_optimizer(lambda tensors: kind(tensors, **options))


class SignDescent(torch.optim.Optimizer):
    """An optimizer of a third party, which writes behind autograd's back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            wanted = [p for p in group["params"] if p.grad is not None]
            signs = torch._foreach_sign([p.grad for p in wanted])
            torch._foreach_add_([p.data for p in wanted], signs, alpha=-group["lr"])


class NoOptimizer:
    """One that does not even inherit from torch's, so that no hook of torch's is called."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    def step(self) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        torch._foreach_add_([p.data for p in self.params], grads, alpha=-0.1)


@pytest.mark.parametrize("kind", [SignDescent, NoOptimizer])
def test_never_stale_after_a_step_of_a_third_party(kind: Any) -> None:
    check_optimizer(kind)


def check_optimizer(make: Callable[[list[torch.Tensor]], Any]) -> None:
    """Trains a model and its twin, and compares a train and an eval graph all along."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    optimizers = [make([p for p in m.parameters() if p.dim() == 2]) for m in (net, twin)]
    programs: tuple[Any, ...] = (compiled, functools.partial(autocast, twin))
    before = net.a.weight.detach().clone()
    for _ in range(3):
        TRAIN.check(compiled, net, twin)
        EVAL.check(compiled, net, twin)
        for optimizer, program in zip(optimizers, programs, strict=True):
            step_with_closure(optimizer, program)
        EVAL.check(compiled, net, twin)
    assert not torch.equal(before, net.a.weight), "the optimizer must have written"


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_training_learns(name: str) -> None:
    """The same loss as eager autocast, step by step, from the first to the last."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    programs: tuple[Any, ...] = (compiled, functools.partial(autocast, twin))
    optimizers = [
        getattr(torch.optim, name)(m.parameters(), lr=0.02, fused=True) for m in (net, twin)
    ]
    losses: list[list[float]] = [[], []]
    for _ in range(20):
        for optimizer, program, found in zip(optimizers, programs, losses, strict=True):
            optimizer.zero_grad()
            loss = loss_of(program)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.5 * losses[0][0]

"""`compile_step`: the numbers of the eager way, in one graph, without waiting."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import amp_fx
from tests.grad_scaler.loops import make_params, set_scaled_grads, snapshot


def sparse(scaler: Any, embedding: torch.nn.Embedding) -> None:
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()


def test_sparse_gradients_run_eagerly_and_say_so() -> None:
    results = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(4, 2, sparse=is_sparse)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        grad_scaler = amp_fx.GradScaler("cpu")
        step = grad_scaler.compile_step(optimizer, max_norm=0.5, backend="eager")
        for i in range(3):
            optimizer.zero_grad()
            sparse(grad_scaler, embedding)
            if i == 0 and is_sparse:
                with pytest.warns(UserWarning, match="run eagerly, .* dense"):
                    step()
            else:
                step()
        results.append(embedding.weight.detach())
    torch.testing.assert_close(results[0], results[1])


def make_case(**settings: Any) -> tuple[Any, ...]:
    params = make_params((4, 3), (5,))
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    grad_scaler = amp_fx.GradScaler("cpu", growth_interval=1, **settings)
    return grad_scaler, optimizer, params


def test_an_update_too_many_does_nothing() -> None:
    grad_scaler, optimizer, params = make_case(init_scale=2.0)
    step = grad_scaler.compile_step(optimizer, backend="eager")
    for expected in (4.0, 8.0, 16.0):
        set_scaled_grads(grad_scaler, params, None)
        step()
        grad_scaler.update()
        assert grad_scaler.get_scale() == expected
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        grad_scaler.update()


def test_scalers_can_be_shared() -> None:
    grad_scaler, optimizer, params = make_case(init_scale=8.0)
    other_params = make_params((2,))
    other = torch.optim.SGD(other_params, lr=0.1)
    step = grad_scaler.compile_step(optimizer, update_scale=False, backend="eager")
    for bad, expected in ((None, 16.0), (None, 32.0), (math.inf, 16.0)):
        set_scaled_grads(grad_scaler, params, bad)
        set_scaled_grads(grad_scaler, other_params, None)
        step()
        grad_scaler.step(other)
        grad_scaler.update()
        assert grad_scaler.get_scale() == expected


def test_schedulers_know_of_compiled_steps() -> None:
    """Torch warns of a scheduler that is stepped before its optimizer; warnings are errors here."""
    grad_scaler, optimizer, params = make_case()
    step = grad_scaler.compile_step(optimizer, backend="eager")
    set_scaled_grads(grad_scaler, params, None)
    step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_scaled_grads(grad_scaler, params, None)
    step()
    scheduler.step()


def test_parameters_that_join_later() -> None:
    grad_scaler, optimizer, params = make_case()
    step = grad_scaler.compile_step(optimizer, write_grads=True, backend="eager")
    for grads in (params[:1], params[:1], params, params):
        optimizer.zero_grad()
        set_scaled_grads(grad_scaler, grads, None)
        step()
    (twin_scaler, twin, twin_params) = make_case()
    for grads in (twin_params[:1], twin_params[:1], twin_params, twin_params):
        twin.zero_grad()
        set_scaled_grads(twin_scaler, grads, None)
        twin_scaler.step(twin)
        twin_scaler.update()
    expected = snapshot(twin_scaler, twin_params, twin)
    torch.testing.assert_close(snapshot(grad_scaler, params, optimizer), expected)


def test_gradients_that_are_unscaled_already_are_clipped_all_the_same() -> None:
    grad_scaler, optimizer, params = make_case()
    step = grad_scaler.compile_step(optimizer, max_norm=0.5, backend="eager")
    for _ in range(3):
        set_scaled_grads(grad_scaler, params, None)
        grad_scaler.unscale_(optimizer)
        expected = torch.cat([param.grad.flatten() for param in params]).norm()
        step()
        torch.testing.assert_close(step.norm, expected)
        clipped = torch.cat([param.grad.flatten() for param in params]).norm()
        torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("optimizer_name", ["sgd-momentum", "adamw"])
def test_what_a_step_writes_keeps_its_place(optimizer_name: str) -> None:
    """Inductor makes no CUDA graph where an input is written that is not static."""
    moving: list[list[str]] = []
    written: list[int] = []

    def compile_graph(gm: torch.fx.GraphModule, _: Any, **given: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        fixed = {inputs[i] for i in given.get("static_input_idxs", ())}
        copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written.append(len(copies))
        moving.append([node.args[0].name for node in copies if node.args[0] not in fixed])
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=compile_graph)

    params = make_params((4, 3), (5,))
    makers: dict[str, Any] = {
        "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "adamw": torch.optim.AdamW,
    }
    optimizer = makers[optimizer_name](params, lr=0.1)
    grad_scaler = amp_fx.GradScaler("cpu")
    step = grad_scaler.compile_step(optimizer, max_norm=1.0, backend=backend)
    for seed in range(3):
        optimizer.zero_grad()
        set_scaled_grads(grad_scaler, params, None, seed)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            step()
    assert moving == [[], []]  # two passes
    assert written[0] == 0
    assert written[1] > 0

"""Gradients reach float32 parameters in float32, bit for bit as without the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from amp_fx.tables.presets import torch_version
from tests.weights.nets import assert_same, autocast, compile_amp_fx, inputs, make_net, random

COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def test_hooks_of_parameters_see_and_change_float32_gradients() -> None:
    seen: list[list[Any]] = []
    for compiled in (True, False):
        net = make_net()
        calls: list[Any] = []

        def hook(grad: torch.Tensor, calls: list[Any] = calls) -> torch.Tensor:
            calls.append(grad.clone())
            return grad * 2

        net.a.weight.register_hook(hook)  # type: ignore[no-untyped-call]
        out = (
            compile_amp_fx(net, compiler="eager")(inputs()) if compiled else autocast(net, inputs())
        )
        out.sum().backward()  # type: ignore[no-untyped-call]
        seen.append([*calls, net.a.weight.grad])
    assert len(seen[0]) == 2
    assert_same(seen[0], seen[1])


def test_a_graph_that_is_retained() -> None:
    net, twin = make_net(), make_net()
    out, expected = compile_amp_fx(net)(inputs()), autocast(twin, inputs())
    for _ in range(2):
        out.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        expected.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_double_backward() -> None:
    grads = []
    for compiled in (True, False):
        net = make_net()
        out = (
            compile_amp_fx(net, compiler="eager")(inputs()) if compiled else autocast(net, inputs())
        )
        first = torch.autograd.grad(out.square().sum(), list(net.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        assert isinstance(penalty, torch.Tensor)
        grads.append([*first, *torch.autograd.grad(penalty, list(net.parameters()))])
    assert_same(grads[0], grads[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_from_outside(use_reentrant: bool) -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    x, y = inputs(requires_grad=True), inputs(requires_grad=True)
    compiled(x)  # tracing saves tensors too, which checkpoint would count
    with torch.no_grad():
        compiled(x)
    for _ in range(2):
        out = checkpoint(compiled, x, use_reentrant=use_reentrant)
        expected = autocast(lambda v: checkpoint(twin, v, use_reentrant=use_reentrant), y)
        out.sum().backward()
        expected.sum().backward()  # type: ignore[no-untyped-call]
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_false_alarm_refuses_no_backward(compiler: str, is_frozen: bool) -> None:
    net = make_net().requires_grad_(not is_frozen)
    compiled = compile_amp_fx(net, compiler=compiler)
    x, y = inputs(requires_grad=True), inputs(requires_grad=True)
    compiled(y).sum().backward()  # type: ignore[no-untyped-call]
    outs = [compiled(x)]
    for _ in range(2):
        for parameter in net.parameters():
            parameter.data_ptr()
        outs.append(compiled(x))
        with torch.no_grad():
            compiled(x)
    outs[0].sum().backward()  # type: ignore[no-untyped-call]
    assert_same(x.grad, y.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_by_inputs() -> None:
    """From torch 2.14 on Dynamo captures nothing of it: a region is what says autocast then."""
    forward_ad: Any = torch.autograd.forward_ad
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net, compiler="eager")
    tangents = []
    programs: list[Any] = [lambda v: autocast(twin, v), lambda v: autocast(compiled, v)]
    if torch_version() < (2, 14):
        programs.append(compiled)
    for program in programs:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs(), random(3, 4, seed=5))
            tangents.append(forward_ad.unpack_dual(program(dual)).tangent)
    assert_same(tangents, [tangents[0]] * len(tangents))

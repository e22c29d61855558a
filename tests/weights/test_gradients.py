"""Gradients reach float32 parameters in float32, bit for bit as without the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from amp_fx import weight_cache
from amp_fx.tables.presets import torch_version
from tests.weights.nets import (
    EVAL,
    TRAIN,
    assert_same,
    autocast,
    compile_amp_fx,
    gradients,
    inputs,
    make_net,
    random,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_gradients_are_float32_and_the_same_with_and_without_the_cache(compiler: str) -> None:
    net = make_net()
    compiled = compile_amp_fx(net, compiler=compiler)
    plain = compile_amp_fx(net, compiler=compiler, weight_cache=False)
    for _ in range(3):
        expected = plain(inputs())
        actual = compiled(inputs())
        assert_same(actual, expected)
        grads = gradients(actual, net)
        assert [grad.dtype for grad in grads if grad is not None] == [torch.float32] * 3
        assert_same(grads, gradients(expected, net))
        net.a.weight.data.mul_(1.5)


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


def test_checkpointed_inside() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(lambda v: net.b(checkpoint(net.a, v, use_reentrant=False)))
    for _ in range(2):
        out = compiled(inputs())
        expected = autocast(lambda v: twin.b(checkpoint(twin.a, v, use_reentrant=False)), inputs())
        assert_same(out, expected)
        assert_same(gradients(out, net), gradients(expected, twin))
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)


# A weight that changes between a forward and its backward.


def scale(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(3)


def replace_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 3


def scale_list(net: nn.Module) -> None:
    torch._foreach_mul_([parameter.data for parameter in net.parameters()], 3.0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("change", [scale, replace_data, scale_list])
def test_a_change_and_another_forward_leave_the_first_backward_as_it_was(
    compiler: str, is_frozen: bool, change: Callable[[nn.Module], None]
) -> None:
    """A backward keeps the casts that its forward used, as eager autocast's does."""
    net, twin = (make_net().requires_grad_(not is_frozen) for _ in range(2))
    compiled = compile_amp_fx(net, compiler=compiler)
    for second in (None, TRAIN, EVAL):  # the graph of the other forward
        x, y = inputs(requires_grad=True), inputs(requires_grad=True)
        outs = compiled(x), autocast(twin, y)
        for model in (net, twin):
            model.zero_grad()
            change(model)
        if second is not None:
            with torch.set_grad_enabled(second is TRAIN):
                assert_same(compiled(inputs()), autocast(twin, inputs()))
        for out in outs:
            out.sum().backward()  # type: ignore[no-untyped-call]
        assert_same(x.grad, y.grad)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


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


def test_a_native_graph_that_reads_a_weight_is_no_change() -> None:
    net = make_net()
    compiled = compile_amp_fx(net)
    reader = torch.compile(lambda w: w.sum(), backend="aot_eager")
    out = compiled(inputs())
    reader(net.a.weight)
    compiled(inputs())
    out.sum().backward()  # type: ignore[no-untyped-call]


def test_clearing_the_cache_does_not_touch_a_pending_backward() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    out = compiled(inputs())
    weight_cache.clear()
    net.a.weight.data.mul_(3)
    compiled(inputs())
    assert_same(gradients(out, net), gradients(autocast(twin, inputs()), twin))


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

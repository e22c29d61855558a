"""Where gradients flow, casts are kept as soon as a second call would take them, and no longer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from amp_fx.backend import entry as backend
from amp_fx.backend import inner
from amp_fx.weights.engine import engine
from amp_fx.weights.variants import Casting, Later
from tests.weights.nets import (
    EVAL,
    SIZE,
    assert_same,
    compile_amp_fx,
    counted_refreshes,
    inputs,
    make_net,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(engine() is None, reason="the compiled part cannot be built")

COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def trained(
    compiler: str, pattern: list[int], *, has_cache: bool, left_out: str = ""
) -> tuple[list[torch.Tensor], nn.Module]:
    """All losses and gradients of updates with so many calls each, and the model.

    What is left out is frozen (``"frozen a"``), or no weight of the optimizer's (``"a.bias"``).
    """
    net = make_net()
    net.a.requires_grad_(left_out != "frozen a")
    compiled = compile_amp_fx(net, compiler=compiler, weight_cache=has_cache, fallback=False)
    wanted = [p for p in net.parameters() if p.requires_grad]
    updated = [p for n, p in net.named_parameters() if p.requires_grad and n != left_out]
    optimizer = torch.optim.SGD(updated, lr=0.1)
    found = []
    for num_calls in pattern:
        for _ in range(num_calls):
            loss = compiled(inputs()).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(loss.detach())
        found += [p.grad.clone() for p in wanted if p.grad is not None]
        optimizer.step()
        net.zero_grad()
    return found, net


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("left_out", ["", "frozen a", "a.bias"])
@pytest.mark.parametrize("pattern", [[1, 1, 1, 1, 1], [3, 3], [1, 4, 1, 1, 1, 1, 2, 1]], ids=str)
def test_losses_and_gradients_are_those_without_kept_casts(
    compiler: str, pattern: list[int], left_out: str
) -> None:
    kept, _ = trained(compiler, pattern, has_cache=True, left_out=left_out)
    torch._dynamo.reset()
    plain, _ = trained(compiler, pattern, has_cache=False, left_out=left_out)
    assert_same(kept, plain)


def test_further_calls_of_an_update_cast_nothing() -> None:
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        with counted_refreshes() as num_made:
            for _ in range(4):
                compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
            assert num_made() == 3
        optimizer.step()


def test_casts_that_no_second_call_takes_are_not_kept() -> None:
    weight_cache.clear()
    _, net = trained("aot_eager", [1] * 6, has_cache=True)
    assert weight_cache.stats().bytes == 0
    del net


def test_weights_whose_smallest_is_never_written_are_tried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest tells whether weights were written; here it errs."""
    num_taken = 0
    get = Later.get

    def counting(this: Later[Any], args: Any) -> Any:
        nonlocal num_taken
        variant = get(this, args)
        num_taken += not isinstance(variant, Casting)
        return variant

    monkeypatch.setattr(Later, "get", counting)
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    optimizer = torch.optim.SGD([net.a.weight, net.b.weight], lr=0.1)
    taken = []
    for _ in range(3):
        num_taken = 0
        for _ in range(20):
            compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        taken.append(num_taken)
    assert taken[0] > taken[1] >= taken[2] > 0


def test_they_are_kept_again_once_a_second_call_comes() -> None:
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for num_calls in [1] * 6 + [4] * 2:
        for _ in range(num_calls):
            compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with counted_refreshes() as num_made:
        for _ in range(4):
            compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        assert num_made() == 3


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one number, that of the inputs, for each graph that is compiled."""
    found: list[int] = []
    original: Callable[..., Any] = inner.compile_inner

    def counting(gm: Any, example_inputs: Any, options: Any) -> Any:
        found.append(len(example_inputs))
        return original(gm, example_inputs, options)

    monkeypatch.setattr(backend, "compile_inner", counting)
    return found


def test_the_other_variant_is_compiled_when_a_call_finds_weights_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilations = count_compilations(monkeypatch)
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    for _ in range(3):
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        net.a.weight.data.mul_(1.5)
        net.a.bias.data.mul_(1.5)
        net.b.weight.data.mul_(1.5)
    assert len(compilations) == 1
    for _ in range(3):
        compiled(inputs())
    assert len(compilations) == 2


def test_frozen_weights_are_cast_once() -> None:
    net = make_net()
    net.a.requires_grad_(requires_grad=False)
    compiled = compile_amp_fx(net, compiler="aot_eager")
    compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
    net.b.weight.data.mul_(1.5)
    with counted_refreshes() as num_made:
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        assert num_made() == 0


@pytest.mark.parametrize("num_calls", [1, 3])
def test_an_evaluation_between_updates_sees_each(num_calls: int) -> None:
    net, twin = make_net(), make_net()
    compiled, evaluated = compile_amp_fx(net, compiler="aot_eager"), EVAL.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        for _ in range(num_calls):
            compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        twin.load_state_dict(net.state_dict())
        EVAL.check(evaluated, net, twin)


def test_it_is_compiled_next_to_threads_that_call_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch refuses a thread that calls anything compiled while another traces."""
    compilations = count_compilations(monkeypatch)
    net, other = make_net(), make_net(1)
    compiled, called = compile_amp_fx(net, compiler="aot_eager"), compile_amp_fx(other)
    native = torch.compile(other.b, backend="eager", dynamic=False)
    expected = called(inputs()), native(inputs())
    num_compiled = len(compilations)
    stop = threading.Event()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                assert_same((called(inputs()), native(inputs())), expected)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    outs = [compiled(inputs()) for _ in range(4)]
    net.b.weight.data.mul_(2)  # one alone is stale
    outs.append(compiled(inputs()) / 2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert_same(outs, [outs[0]] * 5)
    assert len(compilations) - num_compiled == 2


def test_threads_that_call_while_it_is_compiled_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilations = count_compilations(monkeypatch)
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    expected = compiled(inputs()).detach()
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: compiled(inputs()).detach(), range(16)))
    assert_same(outs, [expected] * 16)
    assert len(compilations) == 2


def test_a_graph_of_symbolic_shapes_has_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = count_compilations(monkeypatch)
    net, twin = make_net(), make_net()
    compiled = torch.compile(net, backend="amp_fx", options={"compiler": "aot_eager"}, dynamic=True)
    for rows in (2, 3, 5):
        x = torch.ones(rows, SIZE)
        with torch.autocast("cpu", torch.bfloat16):
            expected = twin(x).float()
        out = compiled(x)
        assert_same(out, expected)
        out.sum().backward()
        net.a.weight.data.mul_(1.5)
        twin.a.weight.data.mul_(1.5)
    assert len(compilations) == 1

"""torch_private.autocast, autograd, modes, tensors and modules: what is relied on."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_fx.torch_private import autocast, autograd, modules, tensors


def test_tensors_of_one_device_type_are_cast_but_for_float64() -> None:
    values = (torch.ones(2), torch.ones(2).double(), torch.ones(2).int(), 3, [torch.ones(2)])
    cast: Any = autocast.cast_tensors(values, "cpu", torch.bfloat16)
    assert [cast[0].dtype, cast[4][0].dtype] == [torch.bfloat16] * 2
    assert [cast[1].dtype, cast[2].dtype, cast[3]] == [torch.float64, torch.int32, 3]
    uncast: Any = autocast.cast_tensors(values, "cuda", torch.bfloat16)
    assert uncast[0].dtype == torch.float32


class Doubled(torch.autograd.Function):
    """Function with a wrong derivative, which identifies its results."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        if autograd.are_transforms_active():
            return autograd.below_transform(torch.ops.amp_fx_state.doubled, x)  # type: ignore[no-any-return]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0] * 3

    @staticmethod
    def jvp(_: Any, *tangents: Any) -> Any:
        return tangents[0] * 3


@pytest.mark.filterwarnings("ignore")  # torch's own, of forward-mode derivatives
def test_functions_of_autograd_in_composite_ops_see_each_transform() -> None:
    library = torch.library.Library("amp_fx_state", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("doubled(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    kernel = functools.partial(autograd.apply_in_op, Doubled)
    library.impl("doubled", kernel, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    op, x = torch.ops.amp_fx_state.doubled, torch.ones(2, requires_grad=True)
    assert not autograd.are_transforms_active()
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    one = torch.ones(())
    assert torch.func.grad(op)(one) == 3
    assert torch.func.jvp(op, (one,), (one,)) == (2, 3)
    assert torch.func.grad(torch.func.grad(lambda y: op(y) ** 2 / 2))(one) == 9


def test_saved_tensors_hooks_do_not_run_while_tracing() -> None:
    seen: list[object] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with autograd.disable_saved_tensors_hooks():
            x.exp()
        assert seen == []
        x.exp()
    assert len(seen) == 1


def test_levels_of_a_failed_transform_are_popped() -> None:
    stack = torch._C._functorch.get_interpreter_stack
    before = len(stack() or ())

    with autograd.restore_functorch_levels():
        torch._C._functorch._grad_increment_nesting()
        assert len(stack() or ()) == before + 1
    assert len(stack() or ()) == before


def test_tensors_inside_of_transforms_are_wrapped() -> None:
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.is_functorch_wrapped_tensor(x))
        with autograd.temporarily_clear_interpreter_stack():
            seen.append(bool(torch._C._functorch.get_interpreter_stack()))
        return x.sin()

    torch.vmap(f)(torch.ones(2, 2))
    assert seen == [True, False]
    assert not autograd.is_functorch_wrapped_tensor(torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_graphs_set_grad_mode_and_dual_levels_by_these_functions() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        tangent: torch.Tensor = torch.func.jvp(torch.sin, (x,), (x,))[1]
        return y + tangent

    targets: list[object] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes)
        return gm.forward

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(2))
    wanted = (autograd.set_grad_enabled, autograd.enter_dual_level, autograd.exit_dual_level)
    assert set(wanted) <= {target for target in targets if not isinstance(target, str)}


def test_the_address_of_shared_memory_can_be_asked_without_a_copy() -> None:
    x = torch.ones(4)
    lazy = torch._lazy_clone(x)
    assert tensors.data_address(lazy) == tensors.data_address(x)
    assert tensors.is_cow_tensor(lazy)
    lazy.add_(1)
    assert not tensors.is_cow_tensor(lazy)
    assert tensors.data_address(lazy) != tensors.data_address(x)


def test_nodes_of_autograd_have_numbers_and_can_be_found() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert autograd.latest_sequence_number() == y.grad_fn._sequence_nr()  # type: ignore[union-attr]
    assert autograd.current_autograd_node() is None
    found: list[Any] = []
    y.register_hook(lambda _: found.append(autograd.current_autograd_node()))  # type: ignore[no-untyped-call]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert len(found) == 1


def test_the_tensors_are_known_with_which_a_backward_begins() -> None:
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        call: Any = functools.partial(checkpoint, use_reentrant=True)
        return call(torch.sin, x)  # type: ignore[no-any-return]

    roots: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    losses = [checkpointed(x).sum() for _ in range(3)]
    with autograd.observing_backwards(roots.append):
        torch.autograd.grad(x.sin().sum(), x)
        losses[0].backward()  # type: ignore[no-untyped-call]
        torch.autograd.backward(losses[1:])
        thread = threading.Thread(target=x.sin().sum().backward)
        thread.start()
        thread.join()
    assert [id(root) for root in roots] == [id(loss) for loss in losses]


def test_modules_run_their_forward_in_this_code() -> None:
    seen: list[object] = []

    class Frames(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe()
            while frame is not None:
                seen.append(frame.f_code)
                frame = frame.f_back  # type: ignore[assignment]
            return x

    Frames()(torch.ones(1))
    assert modules.code_of_module_calls() in seen


def test_global_hooks_of_modules_are_seen() -> None:
    assert not modules.has_global_module_hooks()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert modules.has_global_module_hooks()
    finally:
        hook.remove()

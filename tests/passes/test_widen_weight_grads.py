"""Gradients of weights as float32 products: which ones, and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from amp_fx import preset
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.lower import AotGraph, rewrite_graph
from amp_fx.backend.pipeline import aot_passes
from amp_fx.options import Options
from amp_fx.passes import widen_weight_grads
from amp_fx.passes.widen_weight_grads import WidenWeightGrads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MM_DTYPE = torch.ops.aten.mm.dtype
BFLOAT16 = torch.bfloat16


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU does what CUDA's kernel does: sums in float32, not rounded."""
    monkeypatch.setattr(widen_weight_grads, "DEVICES", ("cpu",))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return a.to(dtype) @ b.to(dtype)

    for name in ("mm.dtype", "bmm.dtype"):
        library.impl(name, product, "CPU")  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


class Run:
    """A program's gradients, with its backward rewritten, and what was rewritten."""

    def __init__(self) -> None:
        self.widened = 0
        self.graphs: list[fx.Graph] = []

    def backward(self, gm: fx.GraphModule, _: Any) -> Any:
        self.widened += WidenWeightGrads().call(gm).counts["wide_weight_grads"]
        self.graphs.append(gm.graph)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def __call__(self, program: Callable[..., Any], *args: torch.Tensor, **how: Any) -> None:
        compiler = aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
            bw_compiler=self.backward,
            decompositions=select_decomp_table(),
        )
        torch.compile(program, backend=compiler, **how)(*args).sum().backward()

    def targets(self) -> list[Any]:
        return [node.target for graph in self.graphs for node in graph.nodes]


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def grad_of(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Linear layer with autocast's casts, squared so that its gradients are not all ones."""
    result: torch.Tensor = (x.to(BFLOAT16) @ w.to(BFLOAT16).t()).float() ** 2
    return result


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of ``w``: the product of what the backward reads, summed in float32."""
    low, weight = x.detach().to(BFLOAT16), w.detach().to(BFLOAT16)
    grad = (2 * (low @ weight.t()).float()).to(BFLOAT16)
    return grad.float().t() @ low.float()


@pytest.mark.usefixtures("emulated")
def test_the_product_is_not_rounded() -> None:
    x, w = matrices((64, 16), (8, 16))
    run = Run()
    run(linear, x.detach(), w)
    assert run.widened == 1
    grad = grad_of(w)
    assert torch.equal(grad, exact(x, w))
    assert not torch.equal(grad, grad.to(BFLOAT16).float())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_batches_are_one_product(dynamic: bool) -> None:
    x, w = matrices((4, 16, 16), (8, 16))
    run = Run()
    run(linear, x.detach(), w, dynamic=dynamic)
    assert run.widened == 1
    assert torch.allclose(grad_of(w), exact(x.flatten(0, 1), w), rtol=1e-6, atol=1e-4)


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Layer of experts with autocast's casts; each expert has separate rows and a weight."""
    result: torch.Tensor = torch.bmm(x.to(BFLOAT16), w.to(BFLOAT16)).float() ** 2
    return result


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(
    torch.ops.aten.bmm.default not in widen_weight_grads.wide_products(),
    reason="inductor does not lower aten.bmm.dtype",
)
def test_the_products_of_experts_are_not_rounded() -> None:
    x, w = matrices((4, 64, 16), (4, 16, 8))
    run = Run()
    run(experts, x.detach(), w)
    assert run.widened == 1
    assert torch.ops.aten.bmm.dtype in run.targets()
    low, weight = x.detach().to(BFLOAT16), w.detach().to(BFLOAT16)
    grad = (2 * torch.bmm(low, weight).float()).to(BFLOAT16)
    assert torch.equal(grad_of(w), low.float().mT @ grad.float())


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(linear, x, w, use_reentrant=False)
    return result


@pytest.mark.usefixtures("emulated")
def test_what_the_forward_computes_stays_rounded() -> None:
    """A product that is recomputed and cast to float32 is the forward's."""
    x, w = matrices((64, 16), (8, 16))
    run = Run()
    run(checkpointed, x.detach(), w)
    assert run.widened == 1
    assert torch.ops.aten.mm.default in run.targets(), "the product of the forward"
    assert torch.equal(grad_of(w), exact(x, w))


@pytest.mark.usefixtures("emulated")
def test_a_gradient_that_is_read_low_stays_low() -> None:
    """One product is the gradient of a float32 weight and of a low one, in their sum."""
    x, v = matrices((64, 16), (16, 8))
    w = torch.zeros(16, 8, dtype=BFLOAT16, requires_grad=True)
    run = Run()
    run(lambda v, w: (x.detach().to(BFLOAT16) @ (v.to(BFLOAT16) + w)).float() ** 2, v, w)
    assert run.widened == 0
    assert torch.equal(grad_of(v), grad_of(w).float())


def test_devices_without_the_kernel_are_left_alone() -> None:
    x, w = matrices((64, 16), (8, 16))
    run = Run()
    run(linear, x.detach(), w)
    assert MM_DTYPE not in run.targets()


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_it_runs_on_the_backward_before_the_passes_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's own ``post_grad_custom_pre_pass`` is not replaced."""
    seen: list[Any] = []
    call = WidenWeightGrads.call

    def spy(this: WidenWeightGrads, gm: fx.GraphModule) -> Any:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        seen.append(any(name.startswith("tangents") for name in names))
        return call(this, gm)

    def theirs(_: fx.Graph) -> None:
        seen.append("theirs")

    monkeypatch.setattr(WidenWeightGrads, "call", spy)
    options: dict[str, Any] = {
        "dtype": BFLOAT16,
        "weight_grads": "float32",
        "post_grad_custom_pre_pass": theirs,
    }
    model = nn.Linear(4, 4)
    with torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(model, backend="amp_fx", options=options)(torch.randn(2, 4)).sum().backward()
    assert seen == [False, "theirs", True, "theirs"]


def has_it(**options: Any) -> bool:
    passes = aot_passes(
        Options.parse(options),
        None,
        stage="backward",
        num_returned=1,
        is_inductor=True,
        is_strict=False,
    )
    return any(isinstance(each, WidenWeightGrads) for each in passes)


def test_it_is_on_where_it_is_asked_for_and_in_lean() -> None:
    assert not has_it()
    assert has_it(weight_grads="float32")
    assert has_it(policy="lean")
    assert has_it(policy=preset("lean").with_ops({"softmax": "fp32"}))
    assert not has_it(policy="lean", weight_grads="autocast")


@pytest.mark.usefixtures("emulated")
def test_modes_around_the_first_backward_do_not_see_the_graph() -> None:
    """A backward is compiled when it runs, here under fake tensors of another mode."""

    def backward(rows: torch.Tensor, tangents: torch.Tensor) -> tuple[torch.Tensor]:
        product = torch.ops.aten.mm.default(rows, tangents)
        return (torch.ops.prims.convert_element_type.default(product, torch.float32),)

    low = torch.randn(4, 4).bfloat16()
    gm = make_fx(backward, tracing_mode="fake")(low, low)
    *_, tangents = gm.graph.find_nodes(op="placeholder")
    tangents._rename("tangents_1")
    graph = AotGraph(gm, [], {"is_backward": True}, is_counted=False)
    with FakeTensorMode():
        rewrite_graph(graph, Options.parse({"weight_grads": "float32"}), None)
    assert MM_DTYPE in [node.target for node in gm.graph.nodes]

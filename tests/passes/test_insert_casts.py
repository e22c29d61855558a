"""insert_casts: which casts come in, what stays as it is, and that values are fresh."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo import compiled_autograd

from amp_fx.backend.pipeline import run_passes
from amp_fx.errors import UnsupportedError
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.tables.cast_policy import CastPolicy
from tests.programs import (
    POLICY,
    capture_program,
    compiled,
    graph_text,
    matrices,
    run_settling,
    site,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from amp_fx.graphs.records import AutocastSite
    from tests.programs import Captured, Program

linear = torch.nn.functional.linear


def insert(captured: Captured, where: AutocastSite | None = None) -> Counter[str]:
    """Runs the pass alone, with what it needs before, and checks the graph after."""
    passes = (MarkRegions(where or site()), InsertCasts(POLICY))
    return run_settling(captured.gm, passes)


def square(rng: torch.Generator, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng).to(dtype).requires_grad_()


def test_golden_linear(rng: torch.Generator) -> None:
    bias = torch.randn(4, generator=rng)
    captured = capture_program(
        lambda x, w, b: linear(x, w, b).relu(), square(rng), square(rng), bias
    )
    assert insert(captured) == {"casts_inserted": 3, "nodes_decomposed": 1}
    assert captured.text().splitlines() == [
        "graph(x: f32, w: f32, b: f32)",
        "b_bf16: bf16 = aten._to_copy.default(b, dtype=torch.bfloat16)",
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "linear: bf16 = aten.linear.default(x_bf16, w_bf16, b_bf16)",
        "relu: bf16 = .relu(linear)",
        "return (relu,)",
    ]


def test_golden_list_argument_and_promotion(rng: torch.Generator) -> None:
    low = square(rng, dtype=torch.bfloat16)
    captured = capture_program(lambda x, y: torch.cat([x, y]), square(rng), low)
    insert(captured)
    assert captured.text().splitlines() == [
        "graph(x: f32, y: bf16)",
        "y_f32: f32 = aten._to_copy.default(y, dtype=torch.float32)",
        "cat: f32 = aten.cat.default([x, y_f32])",
        "return (cat,)",
    ]


def test_golden_composite_is_looked_into(rng: torch.Generator) -> None:
    captured = capture_program(lambda x, w: torch.tensordot(x, w, 1), square(rng), square(rng))
    insert(captured)
    lines = captured.text().splitlines()
    assert "mm: bf16 = aten.mm.default(reshape_bf16, reshape_1_bf16)" in lines
    assert "reshape: f32 = aten.reshape.default(permute, [4, 4])" in lines


def test_golden_checkpoint_body_is_rewritten(rng: torch.Generator) -> None:
    captured = capture_program(checkpointed, square(rng), square(rng))
    insert(captured)
    assert captured.text().splitlines() == [
        "graph(x: f32, w: f32)",
        "wrap_body_0 = self.wrap_body_0",
        (
            "tag_activation_checkpoint: (bf16) = "
            "tag_activation_checkpoint(wrap_body_0, x, w, use_reentrant=False)"
        ),
        "getitem: bf16 = getitem(tag_activation_checkpoint, 0)",
        "return (getitem,)",
    ]
    body = captured.gm.get_submodule("wrap_body_0")
    assert isinstance(body, torch.fx.GraphModule)
    assert graph_text(body).splitlines() == [
        "graph(x: f32, w: f32)",
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(x_bf16, w_bf16)",
        "sin: bf16 = .sin(matmul)",
        "return (sin,)",
    ]


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(
        lambda x: (x @ w).sin(), x, use_reentrant=False
    )
    return result


def test_golden_inputs_are_restored_where_an_op_takes_no_mixture(rng: torch.Generator) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            return y.lerp(w, 0.5)

    captured = capture_program(program, square(rng), square(rng))
    assert insert(captured)["inputs_restored"] == 1
    assert captured.text().splitlines()[-3:] == [
        "matmul_f32: f32 = aten._to_copy.default(matmul, dtype=torch.float32)",
        "lerp: f32 = .lerp(matmul_f32, w, 0.5)",
        "return (lerp,)",
    ]


def product_with_autocast_off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        return y @ w


NO_MIXTURE = {
    "mv": lambda x, w: torch.mv(x @ w, w[0]),
    "index_add": lambda x, w: (x @ w).index_add(0, torch.tensor([0]), w[:1]),
    "index_put": lambda x, w: (x @ w).index_put((torch.tensor([0]),), w[:1]),
    "region switched off": product_with_autocast_off,
    "mask": lambda x, w: written(w, lambda y: y.__setitem__(w > 0, (x @ w)[w > 0].clone())),
    "index": lambda x, w: written(w, lambda y: y.__setitem__(torch.tensor([1, 0, 2, 3]), x @ w)),
    "list": lambda x, w: written(w, lambda y: y.__setitem__([0, 2], (x @ w)[:2])),
    "slice": lambda x, w: written(w, lambda y: y.__setitem__(slice(2), (x @ w)[:2])),
    "column": lambda x, w: written(
        w, lambda y: y.__setitem__((slice(None), torch.tensor([1])), (x @ w)[:, :1])
    ),
    "copy_": lambda x, w: written(w, lambda y: y.copy_(x @ w)),
    "index_put_": lambda x, w: written(
        w, lambda y: y.index_put_((torch.tensor([0]),), (x @ w)[:1], accumulate=True)
    ),
    "masked_scatter_": lambda x, w: written(w, lambda y: y.masked_scatter_(w > 0, x @ w)),
    "scatter_": lambda x, w: written(w, lambda y: y.scatter_(0, w.long() * 0, x @ w)),
    "scatter_reduce": lambda x, w: w.scatter_reduce(0, w.long() * 0, x @ w, "sum"),
    "where": lambda x, w: torch.where(w > 0, x @ w, w),
    "cat": lambda x, w: torch.cat([x @ w, w]),
    "low target, index": lambda x, w: written(
        x @ w, lambda y: y.__setitem__(torch.tensor([1, 0]), w[:2])
    ),
    "low target, index_add_": lambda x, w: written(
        x @ w, lambda y: y.index_add_(0, torch.tensor([0, 1]), w[:2])
    ),
    "low target, through a view": lambda x, w: written(
        x @ w, lambda y: y[:2].index_copy_(0, torch.tensor([1, 0]), w[:2])
    ),
    "normal": lambda x, w: torch.normal(x @ w, w * 0),
    "addr": lambda x, w: torch.addr(torch.tensor(2.0), (x @ w)[0], (x @ w)[1]),
    "custom op": lambda x, w: torch.ops.amp_fx_test_mixtures.sub(x @ w, w),
}


def written(target: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Returns a copy of a tensor after a write."""
    target = target.clone()
    write(target)
    return target


@pytest.fixture(scope="module", autouse=True)
def _op_of_one_dtype() -> Iterator[None]:
    """A custom op that accepts no mixture, as its fake kernel does not say; it may not be tried."""
    with torch.library._scoped_library("amp_fx_test_mixtures", "DEF") as library:
        library.define("sub(Tensor x, Tensor y) -> Tensor")

        def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert x.dtype == y.dtype
            assert not (x == 0).all(), "called on zeros"
            return x - y

        library.impl("sub", kernel, "CPU")
        library.impl("sub", lambda x, y: x - y, "Meta")
        yield


@pytest.mark.parametrize("program", NO_MIXTURE.values(), ids=NO_MIXTURE)
def test_bare_way_runs_what_takes_no_mixture(rng: torch.Generator, program: Program) -> None:
    """Runs a program that was captured in float32, although an input became low."""
    args = square(rng).detach(), square(rng).detach()
    result = compiled(program)(*args)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, program(*args), rtol=0.03, atol=0.03)


UNTOUCHED = {
    "no policy": lambda x: (x + 1).relu(),
    "float64": lambda x: x.double() @ x.double(),
    "integers": lambda x: x.long() @ x.long(),
    "complex": lambda x: x.to(torch.complex64) @ x.to(torch.complex64),
    "in-place method": lambda x: (x + 1).addmm_(x, x),
    "out variant": lambda x: torch.mm(x, x, out=torch.empty(4, 4)),
    "low already": lambda x: x.bfloat16() @ x.bfloat16(),
}


@pytest.mark.parametrize("program", UNTOUCHED.values(), ids=UNTOUCHED)
def test_non_matches_are_untouched(rng: torch.Generator, program: Program) -> None:
    captured = capture_program(program, square(rng).detach())
    before = captured.text()
    assert not insert(captured)
    assert captured.text() == before


def test_nothing_is_cast_outside_of_regions(rng: torch.Generator) -> None:
    captured = capture_program(lambda x: x @ x, square(rng))
    assert not insert(captured, site(enabled=False))


def test_origin_survives_on_rewritten_nodes(rng: torch.Generator) -> None:
    layer = torch.nn.Linear(4, 4)
    weights = {"layer.weight": square(rng), "layer.bias": square(rng)[0].detach()}
    captured = capture_program(
        lambda x, w, b: torch.func.functional_call(
            torch.nn.ModuleDict({"layer": layer})["layer"], {"weight": w, "bias": b}, (x,)
        ),
        square(rng),
        *weights.values(),
    )
    before = captured.node("linear")
    insert(captured)
    for name in ("linear", "x_bf16", "w_bf16"):
        node = captured.node(name)
        assert node.meta["stack_trace"] == before.meta["stack_trace"]
        assert node.meta["nn_module_stack"] == before.meta["nn_module_stack"]
    assert "Linear" in str(before.meta["nn_module_stack"])


def test_banned_op_raises(rng: torch.Generator) -> None:
    banning = POLICY.with_device("cpu", {"aten::matmul": CastPolicy.BANNED})
    captured = capture_program(lambda x: x @ x, square(rng))
    with pytest.raises(UnsupportedError, match="aten::matmul is banned by the policy"):
        run_passes(captured.gm, (MarkRegions(site()), InsertCasts(banning)))


def gradient(x: torch.Tensor, w: torch.Tensor, context: AbstractContextManager[Any]) -> Any:
    w = w.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (x @ w).float().square().sum()
        with context:
            loss.backward()  # type: ignore[no-untyped-call]
    return w.grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_backward_under_compiled_autograd_is_rewritten(compiler: str, rng: torch.Generator) -> None:
    x, w, _ = matrices(rng, 3)
    compiler_fn = torch.compile(backend="amp_fx", options={"compiler": compiler}, fullgraph=True)
    found = gradient(x, w, compiled_autograd._enable(compiler_fn))
    expected = gradient(x, w, contextlib.nullcontext())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

"""``amp_fx.accuracy`` on programs of many kinds: what they do is examined, and put back."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import amp_fx
from tests.numerics.faults import Bare

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.report import AccuracyReport


def compared(step: Callable[..., Tensor], *args: Any) -> AccuracyReport:
    """Returns the report, whose loss in float32 is the program's own."""
    report = amp_fx.accuracy(step)(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention says that it is not compiled
        exact = float(step(*args).detach())
    assert report.reference_loss == pytest.approx(exact, rel=2.4e-7)
    assert report.loss != report.reference_loss
    return report


def test_effects_in_a_step_that_runs_its_own_backward() -> None:
    """Compares effects with those of a separate backward, for any scale of the loss."""
    torch.manual_seed(0)
    net, inputs = Bare(), Bare.inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    plain = amp_fx.accuracy(net)(*inputs)

    def step(*inputs: Tensor) -> Tensor:
        loss: Tensor = net(*inputs)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    report = amp_fx.accuracy(step)(*inputs)
    assert report.predicted_error == pytest.approx(plain.predicted_error, rel=1e-3)
    assert report.predicted_error == pytest.approx(report.error, rel=0.05)
    ours, theirs = ([n.effect_rms for n in r.nodes if n.effect] for r in (report, plain))
    assert ours == pytest.approx(theirs, rel=0.01)


def test_gradients_taken_inside_of_a_step() -> None:
    """Takes gradients in an adversarial step, before the backward of the loss."""
    net = nn.Linear(16, 16)

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        [gradient] = torch.autograd.grad(net(x).square().mean(), x)
        result: Tensor = net(x + 0.1 * gradient.sign()).square().mean()
        return result

    report = amp_fx.accuracy(step)(torch.randn(8, 16))
    assert {g.name for g in report.gradients} >= {"weight", "bias"}
    assert report.predicted_error == pytest.approx(report.error, rel=0.05)


def test_random_numbers_of_python_and_numpy_are_those_of_the_run_before() -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    random.seed(1)
    np.random.seed(1)
    ours: Any = random.getstate()
    theirs: Any = np.random.get_state()
    step: Any = lambda: (x @ w).square().mean() * random.random() * np.random.rand()  # noqa: E731
    report = amp_fx.accuracy(step)()
    assert report.is_repeatable
    assert random.getstate() == ours
    now: Any = np.random.get_state()
    assert np.array_equal(now[1], theirs[1])


def test_hooks_stay_and_are_called() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    calls: list[str] = []

    def doubled(name: str, value: Tensor) -> Tensor:
        calls.append(name)
        return value * 2

    first.register_forward_hook(lambda _, __, out: doubled("forward", out))
    second.register_full_backward_hook(lambda *_: calls.append("backward"))
    second.weight.register_hook(lambda grad: doubled("gradient", grad))  # type: ignore[no-untyped-call]
    second.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))  # type: ignore[no-untyped-call]
    net = nn.Sequential(first, second)
    report = amp_fx.accuracy(net, loss=lambda out: out.square().mean())(torch.randn(4, 8))
    assert calls == ["forward", "forward", "gradient", "backward"], "the leaves' own stay as is"
    assert report.predicted_error == pytest.approx(report.error, rel=0.05)
    assert report.not_examined == ()


def test_a_reentrant_checkpoint() -> None:
    net = Bare()
    net.first.weight.grad = torch.ones_like(net.first.weight)
    x, y = Bare.inputs()
    plain = amp_fx.accuracy(net)(x, y)
    saving: Any = lambda x, y: checkpoint(net, x, y, use_reentrant=True)  # noqa: E731
    report = amp_fx.accuracy(saving)(x.requires_grad_(), y)
    assert report.loss == plain.loss
    ours, theirs = (
        {g.name.removeprefix("function."): g.error for g in found.gradients}
        for found in (report, plain)
    )
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    assert torch.equal(net.first.weight.grad, torch.ones_like(net.first.weight))
    assert net.last.weight.grad is None
    [missing] = report.not_examined
    assert missing.op == "CheckpointFunction"


def test_both_branches_of_cond_and_what_they_close_over() -> None:
    one, other, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.rand(8, 16)

    def step(x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda a: one(a).sin(), other, (x,))
        return found.square().mean()

    for sign, name in ((1, "one"), (-1, "other")):
        report = compared(step, x * sign)
        assert {n.module for n in report.nodes if n.op == "linear"} == {name}
        assert {g.name for g in report.gradients} == {f"{name}.weight", f"{name}.bias"}
        assert report.predicted_error == pytest.approx(report.error, rel=0.05)
        assert report.not_examined == ()


def test_a_loop_with_a_condition() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    w = torch.randn(16, 16) / 8

    def step(x: Tensor) -> Tensor:
        def body(i: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, (a @ w).float().sin()

        found: Tensor = while_loop(lambda i, _: i < 3, body, (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]
        return found.square().mean()

    report = compared(step, torch.randn(8, 16))
    assert sum(n.kernel == "aten::mm" for n in report.nodes) == 3
    assert report.not_examined == ()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")
def test_flex_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = lambda s, b, h, i, j: s + (i - j)  # noqa: ARG005, E731
        found: Any = flex_attention(q, k, v, score_mod=score)
        result: Tensor = found.square().mean()
        return result

    report = compared(step, q, k, v)
    with torch.autocast("cpu"):
        assert report.loss == float(step(q, k, v)), "autocast's numbers, to the bit"
    assert {"matmul", "_safe_softmax"} <= {n.label for n in report.nodes}
    assert report.not_examined == ()


def test_a_nested_tensor() -> None:
    net, parts = nn.Linear(16, 16), [torch.randn(3, 16), torch.randn(5, 16)]

    def step(*parts: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
        values: Tensor = F.layer_norm(net(nested), (16,)).values()
        return (values.float() + 1).square().mean()

    report = compared(step, *parts)
    assert any(n.module_type == "Linear" and n.local for n in report.nodes)
    assert {missing.op for missing in report.not_examined} == {"NestedTensor"}


class Wrapper(torch.Tensor):
    """Wrapper subclass around another tensor."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype)
        made.kept = kept
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapper, lambda t: t.kept, (args, kwargs))
        results = func(*args, **(kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapper, results)


def test_a_tensor_that_stands_for_another() -> None:
    """Measures a program whose loss is a wrapper, too."""
    net, x = nn.Linear(16, 16), torch.randn(4, 16)
    plain = amp_fx.accuracy(net, loss=lambda out: out.square().mean())(x)
    net.weight = nn.Parameter(Wrapper(net.weight.detach()))
    report = amp_fx.accuracy(net, loss=lambda out: out.square().mean())(x)
    assert (report.loss, report.reference_loss) == (plain.loss, plain.reference_loss)
    assert {missing.op for missing in report.not_examined} == {"Wrapper"}


def test_a_gradient_that_is_sparse() -> None:
    net = nn.Sequential(nn.EmbeddingBag(10, 16, sparse=True), nn.Linear(16, 4))
    report = amp_fx.accuracy(net, loss=lambda out: out.square().mean())(torch.tensor([[1, 2]]))
    assert "1.weight" in {g.name for g in report.gradients}
    [missing] = report.not_examined
    assert "not a plain tensor" in missing.why


def test_buffers_that_are_met_in_inference_mode_first() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(x).square().mean()  # type: ignore[no-any-return]

    report = compared(step, torch.randn(2, 3, 8, 8))
    assert report.gradients == ()


class Scaled(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None  # which may be too large


def test_a_custom_function_whose_backward_is_another() -> None:
    """Gradients that are none of the loss do not tell what errors do to it."""
    net = nn.Linear(32, 32)
    step: Any = lambda x: Scaled.apply(net(x), 1e3).float().square().mean()  # type: ignore[no-untyped-call]  # noqa: E731
    report = amp_fx.accuracy(step)(torch.randn(64, 32))
    assert abs(report.predicted_error) > 100 * abs(report.error or 0.0)
    assert report.suspects == ()


def test_lines_of_the_backward_of_a_custom_function() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    step: Any = lambda x: Scaled.apply(x @ w, 1e7).float().sum()  # type: ignore[no-untyped-call]  # noqa: E731
    first = amp_fx.accuracy(step, dtype="float16")(torch.randn(4, 8)).suspects[0]
    assert (first.kind, first.op, first.stage) == ("overflow", "mul", "backward")
    assert first.code == "return gradient * ctx.factor, None  # which may be too large"


def test_modules_outside_of_the_pattern_do_not_move_numbers_of_ops() -> None:
    """Inputs are named by the numbers of ops that were measured."""
    net, inputs = Bare(), Bare.inputs()
    whole = amp_fx.accuracy(net)(*inputs)
    some = amp_fx.accuracy(net, modules="last")(*inputs)
    names = {node.index: node.kernel for node in some.nodes}
    for node in some.nodes:
        assert all(names[index] for index in node.inputs)
    product = [n for n in some.nodes if n.kernel == "aten::addmm" and n.stage == "forward"]
    same = [n for n in whole.nodes if n.kernel == "aten::addmm" and n.module == "last"]
    assert product[0].local == same[0].local
    assert product[0].local < product[0].accumulated < same[0].accumulated, "from the module on"


def test_the_worst_gradient_is_one_that_counts() -> None:
    """The bias of keys has no gradient but what is rounded."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    report = amp_fx.accuracy(layer, loss=lambda out: out[..., :8].square().mean())(
        torch.randn(2, 6, 32)
    )
    worst = report.worst_gradient
    assert worst is not None
    assert worst.cosine > 0.99
    assert 0 < report.gradient_error < 0.05
    assert f"the worst is {worst.name}" in str(report)


def test_an_output_that_is_nothing_in_the_reference() -> None:
    """Reports an infinite error, not zero."""
    report = amp_fx.accuracy(lambda x: (x.bfloat16() - x).float())(torch.full((4,), 1.001))
    assert report.output_error == float("inf")

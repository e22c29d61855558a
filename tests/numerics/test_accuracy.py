"""``amp_fx.accuracy``: numbers against float32 and autocast runs, and against sums by hand."""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx.errors import OptionError, PolicyWarning, UnsupportedError
from amp_fx.numerics.report import AccuracyReport
from tests.numerics.faults import Bare, TinyGPT
from tests.parity.cases import CASES
from tests.parity.models import losses, mutation, opaque, recurrent, shapes, transformers, weights  # noqa: F401 - they register their cases

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.bfloat16, torch.float16)
bf16 = torch.bfloat16

PARITY = (
    "transformer_encoder",
    "transformer_with_masks",
    "decoder_only_with_tied_weights_and_loss",
    "resnet_and_its_running_stats",
    "unet",
    "lstm_cell",
    "gru",
    "in_place_ops",
    "dropout",
    "activation_checkpoint",
    "mixture_of_experts",
    "vmap",
    "func_grad",
    "complex_numbers",
    *(
        "buffers_written_to",
        "train_then_eval",
        "attention_with_float_mask_and_dropout",
        "tied_weights",
    ),
)


def subject_step(name: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Returns a model of the parity tests with a loss, and the leaves that it has."""
    torch.manual_seed(1)
    subject = CASES[name].build()

    def step() -> Tensor:
        generator = torch.Generator().manual_seed(3)
        total = torch.zeros(())
        for leaf in pytree.tree_leaves(subject.drive(subject.program, *subject.args)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                target = torch.randn(leaf.shape, generator=generator)
                total = total + (leaf.float() - target).square().mean()
        return total

    return step, [t for t in subject.state() if t.is_leaf and t.requires_grad]


def loss_and_grads(name: str, dtype: torch.dtype | None) -> tuple[float, list[Tensor | None]]:
    step, leaves = subject_step(name)
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = step()
    return float(loss.detach()), list(torch.autograd.grad(loss, leaves, allow_unused=True))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PARITY)
def test_both_programs_are_those_that_run_alone(name: str, dtype: torch.dtype) -> None:
    """Loss and gradients, of the low program and of the one in float32."""
    step, leaves = subject_step(name)
    before = [leaf.detach().clone() for leaf in leaves]
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = amp_fx.accuracy(step, dtype=dtype)()
        low, low_grads = loss_and_grads(name, dtype)
        if name == "in_place_ops":  # float32 cannot be differentiated: it writes to what it saves
            assert report.loss == low
            return
        exact, grads = loss_and_grads(name, None)
    assert report.is_repeatable
    assert report.loss == low
    assert report.reference_loss == pytest.approx(exact, rel=2.4e-7)
    assert report.suspects == (), [str(s) for s in report.suspects]
    expected = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(low_grads, grads, strict=True)
        if a is not None and b is not None and b.norm() > 0
    ]
    found = [g.error for g in report.gradients if math.isfinite(g.error)]
    assert sorted(found) == pytest.approx(sorted(expected), rel=1e-3, abs=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


def rounded(x: Tensor) -> Tensor:
    return x.to(bf16).double()


def test_the_numbers_of_a_product_by_hand(rng: torch.Generator) -> None:
    a, b = (torch.randn(32, 32, generator=rng) for _ in range(2))
    report = amp_fx.accuracy(torch.matmul)(a, b)
    exact, low = a.double() @ b.double(), (a.to(bf16) @ b.to(bf16)).double()
    same_inputs = rounded(a) @ rounded(b)
    [product] = [n for n in report.nodes if n.kernel == "aten::mm"]
    assert product.local == pytest.approx(
        float((low - same_inputs).norm() / same_inputs.norm()), 1e-3
    )
    assert product.accumulated == pytest.approx(float((low - exact).norm() / exact.norm()), 1e-3)
    casts = [n for n in report.nodes if n.kernel == "aten::_to_copy"]
    errors = [float((rounded(x) - x.double()).norm() / x.double().norm()) for x in (a, b)]
    assert sorted(n.local for n in casts) == pytest.approx(sorted(errors), rel=1e-3)
    assert product.accumulated_in == pytest.approx(max(errors), rel=1e-3)
    assert product.max_abs == pytest.approx(float(exact.abs().max()), rel=1e-4)
    limit = torch.finfo(bf16).max
    assert product.headroom == pytest.approx(math.log2(limit / float(exact.abs().max())), rel=1e-3)
    assert {n.op for n in report.nodes} == {"matmul"}


@pytest.mark.parametrize("value", [0.0, 1e30, math.nan])
def test_what_a_sum_with_a_product_ignores_has_no_error(value: float) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        rows = x @ x
        return torch.addmm(torch.full((4, 4), value), rows, rows, beta=0)

    report = amp_fx.accuracy(program)(torch.eye(4) + 0.25)
    assert report.suspects == (), [str(s) for s in report.suspects]


def test_the_effect_of_an_op_by_hand(rng: torch.Generator) -> None:
    """The loss is the square of the sum: its gradient by the low product is twice that sum."""
    w, x = (torch.randn(16, 16, generator=rng, requires_grad=True) for _ in range(2))

    def step(w: Tensor, x: Tensor) -> Tensor:
        return (w @ x).float().sum().square()

    report = amp_fx.accuracy(step)(w, x)
    low = (w.detach().to(bf16) @ x.detach().to(bf16)).double()
    eps = low - rounded(w.detach()) @ rounded(x.detach())
    middle = (low.sum() + (w.detach().double() @ x.detach().double()).sum()) / 2
    [product] = [n for n in report.nodes if n.kernel == "aten::mm" and n.stage == "forward"]
    assert product.effect == pytest.approx(float(2 * middle * eps.sum()), rel=0.01)
    assert product.effect_rms == pytest.approx(float((2 * middle * eps).norm()), rel=0.01)
    assert report.predicted_error == pytest.approx(report.error, rel=0.02)


def test_the_effect_of_writes_in_place(rng: torch.Generator) -> None:
    """Writes a whole tensor and a part; the gradients of both errors are included."""
    w, x = (torch.randn(64, 64, generator=rng, requires_grad=True) for _ in range(2))

    def step(w: Tensor, x: Tensor) -> Tensor:
        y = w @ x
        y.mul_(x.to(y.dtype)).add_(0.7)
        y[:32].mul_(1.3)
        return (y.float() + 3).square().mean()

    report = amp_fx.accuracy(step)(w, x)
    written = [n for n in report.nodes if n.kernel.endswith("_") and n.stage == "forward"]
    assert [n.kernel for n in written] == ["aten::mul_", "aten::add_", "aten::mul_"]
    assert all(n.effect for n in written)
    assert report.predicted_error == pytest.approx(report.error, rel=0.05)


def test_overflows_and_zeros_by_hand() -> None:
    x = torch.tensor([1.0, 300.0, 1e-5, -1e-5, 0.0, -400.0])

    def step(x: Tensor) -> Tensor:
        return (x.half() * x.half()).float()

    report = amp_fx.accuracy(step, dtype="float16")(x)
    [product] = [n for n in report.nodes if n.kernel == "aten::mul"]
    assert (product.overflows, product.flushed, product.nonzero) == (2, 2, 5)
    assert product.underflow == pytest.approx(2 / 5)
    assert product.op == "mul"
    assert report.suspects[0].kind == "overflow"


def test_both_overflows_of_a_chain_are_seen_in_one_run() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        x = (one(x) * 1e6).float() * 1e-6
        result: Tensor = (two(x) * 1e6).square().mean()
        return result

    report = amp_fx.accuracy(step, dtype="float16")(torch.randn(4, 4))
    assert [s.line for s in report.suspects[:2]] == sorted(s.line for s in report.suspects[:2])
    assert len({s.line for s in report.suspects if s.kind == "overflow"}) == 2
    assert not math.isfinite(report.loss or 0.0), "the loss is that of the program as it is"


def test_a_compiled_step_is_looked_into() -> None:
    net, inputs = TinyGPT(), TinyGPT.inputs()
    compiled = amp_fx.compile(net, dtype="float16", options={"compiler": "eager"})
    report = amp_fx.accuracy(compiled)(*inputs)
    assert report.dtype == "float16"
    assert report.nodes == amp_fx.accuracy(net, dtype="float16")(*inputs).nodes
    inside = torch.compile(net, backend="eager")
    found = amp_fx.accuracy(lambda *batch: inside(*batch) * 1, dtype="float16")(*inputs)
    assert found.loss == report.loss


def test_a_policy_of_compiled_code_is_not_examined() -> None:
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    policy = amp_fx.preset("torch").with_ops({"linear": "fp32"})
    with pytest.warns(PolicyWarning, match="ops follow torch.autocast and not the policy"):
        call = amp_fx.accuracy(amp_fx.compile(net, policy=policy))
    assert call(x).nodes == amp_fx.accuracy(net)(x).nodes


# Programs of many kinds.


def test_modules_paths_are_those_of_explain() -> None:
    net, inputs = TinyGPT(), TinyGPT.inputs()
    explained = {n.module for n in amp_fx.explain(net)(*inputs).nodes if n.kind == "op"}
    assert {n.module for n in amp_fx.accuracy(net)(*inputs).nodes} <= explained


def test_a_checkpoint_gives_what_its_function_gives() -> None:
    net = Bare()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = net(x, y)
        return result

    def saving(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = checkpoint(net, x, y, use_reentrant=False)
        return loss

    one, other = (amp_fx.accuracy(step)(*Bare.inputs()) for step in (plain, saving))
    assert [n.effect for n in one.nodes] == [n.effect for n in other.nodes]
    assert [g.error for g in one.gradients] == [g.error for g in other.gradients]


def test_what_cannot_be_examined_is_listed() -> None:
    @torch.library.custom_op("amp_fx_tests::only_half", mutates_args=())
    def only_half(x: Tensor) -> Tensor:
        if x.dtype != torch.float16:
            raise RuntimeError("only_half takes float16")
        return x * 2

    report = amp_fx.accuracy(lambda x: only_half(x.half()), dtype="float16")(torch.randn(4))
    [missing] = report.not_examined
    assert missing.op == "amp_fx_tests::only_half"
    assert "only_half takes float16" in missing.why
    assert "not examined: amp_fx_tests::only_half" in str(report)


def test_outputs_without_a_loss() -> None:
    """Effects are on a random direction of the outputs; their squares add up to the error's."""
    net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(128, 64)
    report = amp_fx.accuracy(net)(x)
    assert report.is_probed
    assert report.loss is None
    with torch.no_grad(), torch.autocast("cpu"):
        low = net(x).double()
    exact = net(x).detach().double()
    actual = float((low - exact).norm())
    predicted = math.sqrt(sum(n.effect_rms**2 for n in report.nodes))
    assert predicted == pytest.approx(actual, rel=0.2)
    assert report.output_error == pytest.approx(actual / float(exact.norm()), rel=1e-3)


def test_the_scale_that_float16_gradients_need() -> None:
    """Gradients of 1e-7 or so: at scale 1 they are flushed, at the largest scale they are not."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(64, 32)

    def step(x: Tensor) -> Tensor:
        result: Tensor = net(x).float().square().mean() * 1e-4
        return result

    before = amp_fx.accuracy(step, dtype="float16")(x)
    assert before.flushed_gradients > 0.05
    after, beyond = (
        amp_fx.accuracy(step, dtype="float16", scale=before.largest_scale * factor)(x)
        for factor in (1, 16)
    )
    assert after.flushed_gradients < 0.02
    assert not any(n.overflows for n in after.nodes)
    assert any(n.overflows for n in beyond.nodes)
    assert after.largest_scale == before.largest_scale


def test_a_program_that_differs_from_run_to_run() -> None:
    generator = torch.Generator()

    def step(x: Tensor) -> Tensor:
        return (x @ torch.randn(8, 8, generator=generator)).square().mean()

    report = amp_fx.accuracy(step)(torch.randn(4, 8))
    assert report.is_repeatable is False
    assert "differs from run to run" in str(report)


# A range rule, data, and what is refused.


def test_json_and_texts() -> None:
    report = amp_fx.accuracy(Bare())(*Bare.inputs())
    again = json.loads(report.to_json())
    assert again == report.to_dict()
    assert again["schema"] == 4
    assert len(again["nodes"]) == len(report.nodes)
    assert {"local", "accumulated", "effect", "headroom", "amplification"} <= set(again["nodes"][0])
    assert "no suspects" in str(report)
    assert "float32" in repr(report)
    assert "<pre" in report._repr_html_()
    assert isinstance(report, AccuracyReport)


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        (nn.Linear(4, 4, device="meta"), (torch.randn(2, 4),), "on the meta device: it has no"),
        (lambda x: x @ torch.empty(4, 4, device="meta"), (torch.eye(4),), "on the meta device"),
        (lambda x: x + 1, (torch.arange(3),), "no op of the program takes a floating-point"),
        (nn.Linear(4, 4).double(), (torch.randn(2, 4).double(),), r"model is in float64.*\.float"),
        (nn.Linear(4, 4).half(), (torch.randn(2, 4).half(),), "the model is in float16"),
        (lambda x: x.argmax(), (torch.randn(3),), "neither a loss nor any floating-point"),
    ],
)
def test_what_cannot_be_run_is_refused(step: Any, args: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        amp_fx.accuracy(step)(*args)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float32"}, OptionError, "is not below float32"),
        ({"scale": 0}, OptionError, "not a positive number"),
        ({"modules": 3}, OptionError, "give patterns"),
        ({"loss": lambda out: out}, UnsupportedError, "not a floating-point scalar"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cast("Any", amp_fx.accuracy(nn.Linear(4, 4), **options))(torch.randn(2, 4))


def test_batch_norm_and_dropout_with_functional_calls() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        h = F.dropout(F.batch_norm(x @ w, None, None, training=True), 0.3)
        return F.scaled_dot_product_attention(h[None], h[None], h[None]).square().mean()

    torch.manual_seed(0)
    x, w = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
    state = torch.get_rng_state()
    report = amp_fx.accuracy(step)(x, w)
    torch.set_rng_state(state)
    assert report.reference_loss == pytest.approx(float(step(x, w).detach()), rel=2.4e-7)


def test_outputs_that_become_infinite_are_counted() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step(x: Tensor) -> Tensor:
        hidden: Tensor = net(x) * 1000
        return hidden - hidden.square().sqrt()

    with torch.autocast("cpu", torch.float16):
        low = step(x)
    report = amp_fx.accuracy(step, dtype="float16")(x)
    number = int((~low.isfinite()).sum())
    assert report.num_bad_outputs == number > 0
    assert f"{number} of their elements become infinite or NaN" in str(report)
    assert amp_fx.accuracy(step, dtype="bfloat16")(x).num_bad_outputs == 0


@pytest.mark.parametrize("calls_backward", [False, True])
def test_gradients_that_begin_with_signs_are_no_suspects(calls_backward: bool) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8) * 1e-4

    def step(x: Tensor) -> Tensor:
        outputs: Tensor = net(x) * 3e4 * 3  # the gradient of the layer's result overflows
        if calls_backward:
            outputs.float().sum().backward()  # type: ignore[no-untyped-call]
        return outputs.detach() if calls_backward else outputs

    report = amp_fx.accuracy(step, dtype="float16")(x)
    assert any(node.overflows for node in report.nodes if node.stage == "backward")
    assert report.is_probed is not calls_backward
    assert any(suspect.stage == "backward" for suspect in report.suspects) is calls_backward

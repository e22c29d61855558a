"""``amp_fx.accuracy`` of products in float8: what is measured is what eager runs differ by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from tests.float8.torchao_oracle import RECIPES, bfloat16_of_cuda, converted

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning")
]


def three() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 16)]
    return nn.Sequential(*layers)


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def relative(low: Tensor, exact: Tensor) -> float:
    return float((low.double() - exact.double()).norm() / exact.double().norm())


def products(report: Any, stage: str) -> list[Any]:
    return [n for n in report.nodes if n.kernel == "amp_fx::float8_product" and n.stage == stage]


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_eager_runs(recipe: str) -> None:
    model, x, policy = three(), torch.randn(16, 32), f"float8-{recipe}"
    report = amp_fx.accuracy(model, policy=policy, loss=loss_of)(x)
    with amp_fx.autocast("cpu", policy=policy):
        low_loss = loss_of(model(x))
    low, exact_loss = gradients(model, low_loss), loss_of(model(x))
    exact = gradients(model, exact_loss)
    assert report.loss == pytest.approx(low_loss.item(), rel=1e-6)
    assert report.reference_loss == pytest.approx(exact_loss.item(), rel=1e-6)
    names = [name for name, _ in model.named_parameters()]
    errors = [relative(*pair) for pair in zip(low, exact, strict=True)]
    measured = {g.name: g.error for g in report.gradients}
    assert measured == pytest.approx(dict(zip(names, errors, strict=True)), rel=1e-3)
    assert report.not_examined == ()
    assert report.predicted_error == pytest.approx(report.error, rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_own_error_of_each_product_is_that_of_torchao(recipe: str) -> None:
    pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
    model, x = three(), torch.randn(16, 32)
    report = amp_fx.accuracy(model, policy=f"float8-{recipe}", loss=loss_of)(x)
    layer = converted(model, recipe).get_submodule("1")
    weight: Tensor = model.get_parameter("1.weight").detach()
    with torch.autocast("cpu", torch.bfloat16):
        given = model[0](x).detach().requires_grad_()
        y = layer(given)
        loss = loss_of(model[2](y))
    y.retain_grad()
    with bfloat16_of_cuda():
        loss.backward()  # type: ignore[no-untyped-call]
    (forward,), (for_input, for_weight) = products(report, "forward"), products(report, "backward")
    wide, grad = given.detach().float(), y.grad.float()
    assert forward.local == pytest.approx(relative(y.detach(), wide @ weight.t()), rel=1e-3)
    assert for_input.local == pytest.approx(relative(given.grad, grad @ weight), rel=1e-3)
    layer_grad: Any = layer.weight.grad
    if recipe != "rowwise-gw-hp":
        assert for_weight.local == pytest.approx(relative(layer_grad, grad.t() @ wide), rel=1e-3)


def test_products_are_named_with_their_recipe() -> None:
    report = amp_fx.accuracy(three(), policy="float8-tensorwise", loss=loss_of)(torch.randn(16, 32))
    (forward,) = products(report, "forward")
    found = [(n.dtype, n.recipe, n.op) for n in (forward, *products(report, "backward"))]
    back = ("float8_e5m2", "tensorwise", "linear")
    assert found == [("float8_e4m3fn", "tensorwise", "linear"), back, back]
    assert "float8 tensorwise" in str(report)
    assert report.to_dict()["nodes"][forward.index]["recipe"] == "tensorwise"
    others = [n for n in report.nodes if n.module in ("0", "2")]
    assert {n.recipe for n in others} == {""}


def outliers() -> tuple[nn.Sequential, Tensor]:
    """One column is a hundred thousand times the others, and next to nothing of it is read."""
    model, x = three(), torch.randn(16, 32)
    with torch.no_grad():
        model.get_parameter("0.weight")[5] *= 1e5
        model.get_parameter("1.weight")[:, 5] *= 1e-6
    return model, x


def test_what_a_scale_flushes_to_zero_is_a_suspect() -> None:
    model, x = outliers()
    report = amp_fx.accuracy(model, policy="float8-rowwise", loss=loss_of)(x)
    suspect = report.suspects[0]
    assert (suspect.module, suspect.op, suspect.kind) == ("1", "linear", "underflow")
    assert "scales bring the largest ones to 448, the limit of float8_e4m3fn" in suspect.why
    (forward,) = products(report, "forward")
    with torch.autocast("cpu", torch.bfloat16):
        given = model[0](x).detach().float()
    weight = model.get_parameter("1.weight").detach()
    smallest = 2.0**-10  # what is below half the smallest number of e4m3 becomes zero
    flushed = 0
    for operand in (given, weight):
        scale = torch.exp2(torch.floor(torch.log2(448 / operand.abs().amax(1, keepdim=True))))
        flushed += int((operand.abs() * scale <= smallest).sum())
    assert forward.flushed == flushed > 100
    mended = report.mended()
    assert 'linear = "lower_precision_fp"' in str(mended)
    again = amp_fx.accuracy(model, policy=mended, loss=loss_of)(x)
    assert again.suspects == ()
    assert products(again, "forward") == []


def test_the_limit_of_gradients_is_that_of_e5m2() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = three()

        def forward(self, x: Tensor) -> Tensor:
            scales = torch.ones(64)
            scales[0] = 1e12
            y = self.layers[1](self.layers[0](x)) * scales
            return loss_of(self.layers[2](y) / 1e12)

    torch.manual_seed(0)
    model = Scaled()
    report = amp_fx.accuracy(model, policy="float8-tensorwise")(torch.randn(16, 32))
    flushed = [n for n in products(report, "backward") if n.flushed]
    assert flushed
    assert "57344, the limit of float8_e5m2" in flushed[0].reason


def test_a_cast_of_the_program_that_overflows() -> None:
    def step(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        return ((x @ w) * 1e6).to(dtype).float().square().mean()

    for dtype, limit in ((torch.float8_e4m3fn, "448"), (torch.float8_e5m2, "57344")):
        report = amp_fx.accuracy(step)(torch.randn(8, 8), torch.randn(8, 8), dtype)
        assert f"the limit is {limit}" in report.suspects[0].why
        assert report.suspects[0].kind == "overflow"


def test_an_input_that_is_written_to_after_its_product() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = three()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[0](x)
            y = self.layers[1](hidden)
            with torch.no_grad():
                hidden.zero_()
            return loss_of(self.layers[2](y))

    report = amp_fx.accuracy(Written(), policy="float8-tensorwise")(torch.randn(16, 32))
    assert [m.why for m in report.not_examined] == ["its input was written to before its backward"]


def test_a_checkpoint_runs_it_again() -> None:
    model, x = three(), torch.randn(16, 32, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return loss_of(y)

    plain = amp_fx.accuracy(lambda x: loss_of(model(x)), policy="float8-rowwise")(x)
    again = amp_fx.accuracy(step, policy="float8-rowwise")(x)
    assert again.gradient_error == pytest.approx(plain.gradient_error, rel=1e-6)
    assert len(products(again, "forward")) == 1

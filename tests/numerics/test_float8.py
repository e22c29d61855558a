"""``amp_fx.accuracy`` of products in float8: what is measured is what compiled runs differ by."""

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


def under(policy: Any, model: nn.Module) -> Any:
    torch.compiler.reset()
    return amp_fx.compile(model, policy=policy, options={"compiler": "eager"}, weight_cache=False)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def relative(low: Tensor, exact: Tensor) -> float:
    return float((low.double() - exact.double()).norm() / exact.double().norm())


def products(report: Any, stage: str) -> list[Any]:
    return [n for n in report.nodes if n.kernel == "amp_fx::float8_product" and n.stage == stage]


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_compiled_runs(recipe: str) -> None:
    model, x, policy = three(), torch.randn(16, 32), f"float8-{recipe}"
    report = amp_fx.accuracy(model, policy=policy, loss=loss_of)(x)
    low_loss = loss_of(under(policy, model)(x))
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
    assert str(suspect).startswith("1: linear (forward, float8 rowwise): its own error is")
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


def test_a_gradient_that_one_scale_loses_is_a_suspect() -> None:
    """It meets one row of the weight only, far below the other rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    first, second = model.get_parameter("1.weight"), model.get_parameter("2.weight")
    with torch.no_grad():
        second.zero_()
        second[:, 3] = 1e4 * torch.randn(64)
        first[3] *= 1e-6
    x = torch.randn(32, 64)
    report = amp_fx.accuracy(model, policy="float8-tensorwise")(x)
    [found] = report.suspects
    assert (found.module, found.op, found.stage) == ("1", "linear", "backward")
    assert "of the gradient's norm" in found.why
    repaired = amp_fx.accuracy(model, policy=report.mended())(x)
    assert not [s for s in repaired.suspects if s.module == "1"]


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def spoil(model: nn.Module, index: int) -> None:
    with torch.no_grad():
        model.get_parameter(f"blocks.{index}.up.bias")[3] = 1e6
        model.get_parameter(f"blocks.{index}.down.weight")[:, 3] = 1e-9


class Stack(nn.Module):
    """Blocks; in the third one, a column of an input is huge, and little of it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(64, 16)
        spoil(self, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.last(x))


def error_under(policy: Any, model: nn.Module, x: Tensor) -> float:
    """Returns the largest relative error of the loss and of all gradients, of compiled runs."""
    low = under(policy, model)(x)
    exact = model(x)
    pairs = [torch.cat([g.flatten() for g in gradients(model, y)]) for y in (low, exact)]
    return max(relative(low.detach(), exact.detach()), relative(*pairs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        name if name == "tensorwise" else pytest.param(name, marks=pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_search_finds_the_product_that_does_not_stand_float8(recipe: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, 32)
    assert error_under("float8-" + recipe, model, x) > 0.1
    search = amp_fx.search(model, policy=f"float8-{recipe}", tolerance=0.1, compiler="aot_eager")
    result = search(x)
    assert [str(unit) for unit in result.units] == ["blocks.2.down: linear"]
    assert result.is_minimal
    assert result.runs_in == "bfloat16"
    assert "1 of 8 in bfloat16" in str(result)
    result.policy.save(tmp_path / "amp.toml")
    text = (tmp_path / "amp.toml").read_text()
    assert '"blocks.2.down" = { linear = "lower_precision_fp" }' in text
    loaded = amp_fx.Policy.load(tmp_path / "amp.toml")
    assert loaded == result.policy
    assert error_under(loaded, model, x) == pytest.approx(result.value, rel=1e-5)
    assert result.value <= 0.1
    assert result.compiled_value == pytest.approx(result.value, rel=0.1)
    explained = amp_fx.explain(model, policy=loaded)(x)
    found = [n for g in explained.graphs for n in g.nodes if n.op == "amp_fx.float8_product"]
    assert len(found) == 7
    assert "the limit of float8_e4m3fn" in result.units[0].why
    assert set(result.to_dict()["units"][0]) == {"module", "op", "why", "order", "roots"}


def test_alike_products_that_all_do_not_stand_it_are_one_line() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, 32)
    for index in (0, 1, 3):
        spoil(model, index)
    result = amp_fx.search(model, policy="float8-rowwise", tolerance=0.1, compiler=None)(x)
    assert [str(unit) for unit in result.units] == ["blocks.*.down: linear"]
    assert result.value == pytest.approx(error_under(result.policy, model, x), rel=1e-5)


def test_all_stand_a_wide_tolerance_and_none_a_narrow_one() -> None:
    model, x = three(), torch.randn(16, 32)

    def step(x: Tensor) -> Tensor:
        return loss_of(model(x))

    options: dict[str, Any] = {"policy": "float8-rowwise", "compiler": None}
    assert amp_fx.search(step, tolerance=0.2, **options)(x).units == ()
    message = "every float8 product in bfloat16 it is .* search without float8 first"
    with pytest.raises(amp_fx.errors.UnsupportedError, match=message):
        amp_fx.search(step, tolerance=1e-5, **options)(x)

"""``amp_fx.search`` of products in float8, and float8 casts of a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from tests.composed import Composed
from tests.float8.torchao_oracle import RECIPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning")
]


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def test_a_cast_of_the_program_that_overflows() -> None:
    def step(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        return ((x @ w) * 1e6).to(dtype).float().square().mean()

    for dtype, limit in ((torch.float8_e4m3fn, "448"), (torch.float8_e5m2, "57344")):
        report = amp_fx.accuracy(step)(torch.randn(8, 8), torch.randn(8, 8), dtype)
        assert f"the limit is {limit}" in report.suspects[0].why
        assert report.suspects[0].kind == "overflow"


def block() -> Composed:
    up, down = nn.Linear(64, 128), nn.Linear(128, 64)
    return Composed(
        lambda m, x: x + m.down(nn.functional.gelu(m.up(m.norm(x)))),
        norm=nn.LayerNorm(64),
        up=up,
        down=down,
    )


def stack() -> Composed:
    """Blocks; in the third one, a column of an input is huge, and little of it is read."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for each in model.blocks:
            x = each(x)
        return loss_of(model.last(x))

    blocks = nn.ModuleList(block() for _ in range(4))
    with torch.no_grad():
        blocks.get_parameter("2.up.bias")[3] = 1e6
        blocks.get_parameter("2.down.weight")[:, 3] = 1e-9
    return Composed(forward, first=nn.Linear(32, 64), blocks=blocks, last=nn.Linear(64, 16))


def error_under(policy: Any, model: nn.Module, x: Tensor) -> float:
    """Returns the largest relative error of the loss and of all gradients, of compiled runs."""
    torch.compiler.reset()
    options: Any = {"options": {"compiler": "eager"}, "weight_cache": False}
    results = []
    for program in (amp_fx.compile(model, policy=policy, **options), model):
        loss = program(x)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss.detach().double(), torch.cat([g.flatten() for g in gradients])))
    return max(
        float((low - exact).norm() / exact.norm()) for low, exact in zip(*results, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_search_finds_the_product_that_does_not_stand_float8(recipe: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = stack(), torch.randn(64, 32)
    assert error_under("float8-" + recipe, model, x) > 0.1
    search = amp_fx.search(model, policy=f"float8-{recipe}", tolerance=0.1)
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
    explained = amp_fx.explain(model, policy=loaded)(x)
    found = [n for g in explained.graphs for n in g.nodes if n.op == "amp_fx.float8_product"]
    assert len(found) == 7
    assert result.units[0].why.startswith("without it, the value is")
    assert set(result.to_dict()["units"][0]) == {"module", "op", "why", "kind"}


def test_all_stand_a_wide_tolerance_and_none_a_narrow_one() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 16)]
    model, x = nn.Sequential(*layers), torch.randn(16, 32)

    def step(x: Tensor) -> Tensor:
        return loss_of(model(x))

    options: dict[str, Any] = {"policy": "float8-rowwise"}
    assert amp_fx.search(step, tolerance=0.2, **options)(x).units == ()
    message = "every float8 product in bfloat16 it is .* search without float8 first"
    with pytest.raises(amp_fx.errors.UnsupportedError, match=message):
        amp_fx.search(step, tolerance=1e-5, **options)(x)

"""Compiled steps are audited with the casts that they make: losses are those of compiled code."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import PolicyWarning

if TYPE_CHECKING:
    from collections.abc import Callable

EAGER: dict[str, Any] = {"compiler": "eager"}
BFLOAT16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.norm(F.gelu(self.up(x))))
        return result


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(program: Callable[..., Any]) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(program(x).float(), y)

    return step


def in_backend(model: nn.Module) -> Any:
    return loss_of(torch.compile(model, backend="amp_fx", options=EAGER))


def in_float16(model: nn.Module) -> Any:
    options = {**EAGER, "dtype": "float16"}
    return loss_of(torch.compile(model, backend="amp_fx", options=options))


def by_method(model: nn.Module) -> Any:
    model.compile(backend="amp_fx", options=EAGER)
    return loss_of(model)


def by_amp_fx(model: nn.Module) -> Any:
    return loss_of(amp_fx.compile(model, options=EAGER))


def whole_step(model: nn.Module) -> Any:
    return torch.compile(loss_of(model), backend="amp_fx", options=EAGER)


def compiled_function(model: nn.Module) -> Any:
    return loss_of(torch.compile(model.__call__, backend="amp_fx", options=EAGER))


def compiled_method(model: nn.Module) -> Any:
    return loss_of(torch.compile(model.forward, backend="amp_fx", options=EAGER))


def in_a_list(model: nn.Module) -> Any:
    programs = [torch.compile(model.forward, backend="amp_fx", options=EAGER)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(programs[0](x).float(), y)

    return step


def around(model: nn.Module) -> Any:
    compiled = torch.compile(model, backend="eager")

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16):
            return F.cross_entropy(compiled(x), y)

    return step


def switched_off(model: nn.Module) -> Any:
    compiled = torch.compile(model, backend="amp_fx", options=EAGER)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(compiled(x), y)

    return step


WAYS: dict[Any, str] = {
    in_backend: "bfloat16",
    in_float16: "float16",
    by_method: "bfloat16",
    by_amp_fx: "bfloat16",
    whole_step: "bfloat16",
    compiled_function: "bfloat16",
    compiled_method: "bfloat16",
    in_a_list: "bfloat16",
    around: "bfloat16",
    switched_off: "float32",
}


def test_a_policy_is_not_audited_and_a_warning_says_so() -> None:
    policy = amp_fx.preset("torch").with_ops({"gelu": "fp32"})
    step = loss_of(amp_fx.compile(net(), policy=policy, options=EAGER))
    x, y = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    with pytest.warns(PolicyWarning, match="'forward' .* policies apply to compiled code only"):
        report = amp_fx.audit(step)(x, y)
    assert report.loss == amp_fx.audit(by_amp_fx(net()))(x, y).loss


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_loss_is_that_of_compiled_code(way: Callable[[nn.Module], Any]) -> None:
    model = net()
    x, y = torch.randn(8, 16), torch.randint(16, (8,))
    expected = way(copy.deepcopy(model))(x, y)
    audited = way(model)
    torch._dynamo.reset()
    report = amp_fx.audit(audited)(x, y)
    assert report.loss == expected.item()
    assert {use.dtype for use in report.uses if use.what == "products"} == {WAYS[way]}
    kinds = {finding.kind for finding in report.findings}
    assert kinds == ({"scaler_missing"} if way is in_float16 else set()), str(report)


def test_a_step_keeps_its_variables() -> None:
    """A compiled function is the same object during the audit, and casts as compiled code does."""
    model = net()
    program = torch.compile(model.forward, backend="amp_fx", options=EAGER)
    others = [program]
    expected = [program, program, program._torchdynamo_orig_callable]  # type: ignore[attr-defined]
    seen: list[Any] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        seen[:] = [program, others[0], program._torchdynamo_orig_callable]  # type: ignore[attr-defined]
        return F.cross_entropy(program(x).float(), y)

    x, y = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    report = amp_fx.audit(step)(x, y)
    assert all(now is before for now, before in zip(seen, expected, strict=True))
    assert {use.dtype for use in report.uses if use.what == "products"} == {"bfloat16"}
    assert program(x).dtype == torch.float32

"""No output of a graph is, or looks into, a cached value."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from amp_fx.weights.store import STORE
from tests.weights.nets import SIZE, assert_same, compile_amp_fx, inputs, random

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "weight": lambda x, w: (functional.linear(x, w), w),
    "view of weight": lambda x, w: (functional.linear(x, w), w[1:].t()),
    "transposed before use": lambda x, w: (x @ w.t(), w.t()),
    "weight to bfloat16": lambda x, w: (functional.linear(x, w), w.to(torch.bfloat16)),
    "view of weight to bfloat16": lambda x, w: (functional.linear(x, w), w.bfloat16().view(-1)[2:]),
    "dropout in eval": lambda x, w: functional.dropout(functional.linear(x, w), training=False),
    "one operand": lambda _, w: w @ w,
    "diagonal of product": lambda _, w: torch.diagonal(w @ w),
    "one of two results": lambda x, w: _with_values(functional.linear(x, w), w.max(dim=1)),
    "list": lambda x, w: [functional.linear(x, w), {"w": w.detach()}],
}


def _with_values(x: torch.Tensor, maxima: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x + maxima.values, maxima.values


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_grad_enabled", [True, False])
@pytest.mark.parametrize("is_ambient", [True, False])
def test_outputs_stay_as_they_were(
    name: str, compiler: str, is_grad_enabled: bool, is_ambient: bool
) -> None:
    weight = torch.nn.Parameter(random(SIZE, SIZE))
    compiled = compile_amp_fx(PROGRAMS[name], compiler=compiler)
    region = torch.autocast("cpu") if is_ambient else contextlib.nullcontext()
    with torch.set_grad_enabled(is_grad_enabled), region:
        compiled(inputs(), weight)
        outs = tree_leaves(compiled(inputs(), weight))
        assert not {out.untyped_storage()._cdata for out in outs} & kept_storages()
        own = [out for out in outs if out.untyped_storage()._cdata != weight_storage(weight)]
        before = [out.detach().clone() for out in own]
        weight.data.mul_(3)
        compiled(inputs(), weight)
    assert_same([out.detach() for out in own], before)


def kept_storages() -> set[int]:
    """Returns the storages of all values of the store."""
    values = [value for entry in STORE.entries.values() for value in tree_leaves(entry.value)]
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def weight_storage(weight: torch.Tensor) -> int:
    return int(weight.untyped_storage()._cdata)


@torch.no_grad()
def test_writing_to_an_output_spoils_no_copy() -> None:
    weight = torch.nn.Parameter(random(SIZE, SIZE))
    compiled = compile_amp_fx(PROGRAMS["view of weight to bfloat16"])
    expected = compiled(inputs(), weight)[0].clone()
    compiled(inputs(), weight)[1].zero_()
    assert_same(compiled(inputs(), weight)[0], expected)


class Returning(torch.nn.Module):
    """A convolution, for which inductor forces the strides of outputs, and values of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 8, 4, 4)
        self.scale = torch.nn.Parameter(torch.tensor([6.0, 2.0]))
        self.index = torch.nn.Buffer(torch.arange(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = self.scale
        values = (scale.exp(), scale.clone(), scale.bfloat16(), scale[1:] * 2.0, self.index + 0)
        return self.patch(x).flatten(1), *values


@torch.no_grad()
def test_a_caller_may_write_to_results_beside_a_convolution() -> None:
    model, x = Returning().eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="amp_fx")
    compiled(x)
    expected = [out.clone() for out in compiled(x)]
    for out in compiled(x):
        out.zero_()
    assert_same(compiled(x), expected)


class WithConstants(torch.nn.Module):
    """Constants that depend on no weight, beside products whose weights are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x - torch.tensor([0.25, 0.5]).repeat(8)).float()
        edges = torch.tensor([-0.5, 0.0, 0.5])
        joined = torch.cat([y.sum(0), torch.tensor([1.0, 2.0])])
        return torch.bucketize(y, edges), y[:, torch.tensor([0, 5])], joined, edges


@torch.no_grad()
def test_constants_of_the_program_stay_as_they_are() -> None:
    model, x = WithConstants().eval(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="amp_fx", options={"fallback": False})
    with torch.autocast("cpu"):
        outs, expected = compiled(x), model(x)
    torch.testing.assert_close(outs[1:], expected[1:], rtol=2e-2, atol=2e-2)
    assert (outs[0] != expected[0]).float().mean() < 0.1  # values beside an edge may round across

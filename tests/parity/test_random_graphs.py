"""Random small programs: amp_fx against eager ``torch.autocast``, bit for bit.

A program is a list of instructions over a growing list of [4, 4] values, compiled with and without
a region. Instructions share inputs and weights, so the programs also test the sharing of casts,
which determines the bits of gradients.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parity import oracle
from tests.parity.oracle import LOW_DTYPES, Subject, Way

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = 4
NUM_INPUTS = 2
NUM_WEIGHTS = 2


def random_programs(num_examples: int) -> settings:
    """Returns the settings of random programs.

    ``AMP_FX_EXAMPLES`` sets their number and makes them random. Without it, the same few run each
    time, and a failing one is not shrunk, because that takes minutes.
    """
    examples = os.environ.get("AMP_FX_EXAMPLES")
    return settings(
        max_examples=int(examples or num_examples),
        derandomize=examples is None,
        database=None,
        deadline=None,
        phases=[Phase.generate] + [Phase.shrink] * (examples is not None),
        suppress_health_check=list(HealthCheck),
    )


def like(x: Tensor, y: Tensor) -> Tensor:
    """For ops that take no mixed dtypes, in autocast or out of it."""
    return y.to(x.dtype)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=0),
    "layer_norm": lambda x: F.layer_norm(x, (SIZE,)),
    "exp": lambda x: torch.exp(-x.abs()),
    "sum": lambda x: x.sum(0, keepdim=True).expand(SIZE, SIZE),
    "mean": lambda x: x - x.mean(),
    "prod": lambda x: x.tanh().prod(-1, keepdim=True).expand(SIZE, SIZE),
    "transpose": lambda x: x.t(),
    "view": lambda x: x.reshape(2, 2 * SIZE).view(SIZE, SIZE),
    "flip": lambda x: x.flip(0),
    "chunk": lambda x: torch.cat(x.chunk(2, 0)[::-1]),
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "half": lambda x: x.half(),
    "double": lambda x: x.double().float(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "dropout": lambda x: F.dropout(x, 0.25),
    "getitem": lambda x: x[[1, 0, 3, 2]],
    "pool": lambda x: F.avg_pool1d(x, 3, 1, 1),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, y: x.tanh() @ like(x, y),
    "mm": lambda x, y: torch.mm(x, like(x, y).tanh()),
    "linear": lambda x, y: F.linear(x, like(x, y), like(x, y)[0]),
    "bmm": lambda x, y: torch.bmm(x[None], like(x, y)[None])[0],
    "addmm": lambda x, y: torch.addmm(x, like(x, y), x),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, like(x, y)),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sub": lambda x, y: x.sub(y, alpha=0.5),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x[:2], like(x, y)[2:]]),
    "stack": lambda x, y: torch.stack([x.float(), y.float()]).amax(0),
    "add_": lambda x, y: x.clone().add_(y),
    "mul_": lambda x, y: x.clone().mul_(y),
    "copy_": lambda x, y: x.clone().copy_(y),
    "setitem": lambda x, y: set_rows(x.clone(), y),
    "mse_loss": lambda x, y: x * F.mse_loss(x, like(x, y)),
    "attention": lambda x, y: F.scaled_dot_product_attention(
        x[None, None], like(x, y)[None, None], x[None, None]
    )[0, 0],
}

PRODUCTS = ("matmul", "linear", "mm", "einsum", "bmm", "attention", "addmm")
"""The ops that autocast runs in the low dtype: half of all instructions."""

REGIONS: dict[str, dict[str, Any]] = {
    "same": {},
    "disabled": {"enabled": False},
    "uncached": {"cache_enabled": False},
}


def set_rows(x: Tensor, y: Tensor) -> Tensor:
    x[:2] = y[2:]
    return x


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction: an op, or a region around some, and which values it reads."""

    op: str
    left: int = 0
    right: int = 0
    body: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A program, the leaves that require grad, and the outputs besides the newest values."""

    steps: tuple[Step, ...]
    requires_grad: tuple[bool, ...]
    outputs: tuple[int, ...]


def plans() -> st.SearchStrategy[Plan]:
    index = st.integers(0, 11)
    unary = st.builds(Step, st.sampled_from(sorted(UNARY)), index)
    binary = st.builds(Step, st.sampled_from(sorted(BINARY)), index, index)
    product = st.builds(Step, st.sampled_from(PRODUCTS), index, index)
    plain = st.one_of(product, binary, unary, product)
    regions = st.builds(
        lambda op, body: Step(op, body=tuple(body)),
        st.sampled_from(sorted(REGIONS)),
        st.lists(plain, min_size=1, max_size=3),
    )
    num_leaves = NUM_INPUTS + NUM_WEIGHTS
    return st.builds(
        Plan,
        st.lists(st.one_of(plain, plain, plain, regions), min_size=5, max_size=12).map(tuple),
        st.tuples(*[st.sampled_from([True, True, True, False])] * num_leaves),
        st.lists(index, min_size=1, max_size=3).map(tuple),
    )


def carry_out(steps: tuple[Step, ...], values: list[Tensor]) -> None:
    """Append the result of each step to the values; the newest come first in reach."""
    for step in steps:
        if step.op in REGIONS:
            with torch.autocast("cpu", **region_options(step.op)):
                carry_out(step.body, values)
            continue
        left = values[-1 - step.left % len(values)]
        if step.op in UNARY:
            values.append(UNARY[step.op](left))
        else:
            values.append(BINARY[step.op](left, values[-1 - step.right % len(values)]))


def region_options(name: str) -> dict[str, Any]:
    """Returns a region of the ambient dtype, enabled exactly if the name says so."""
    return {"dtype": torch.get_autocast_dtype("cpu"), **REGIONS[name]}


def as_subject(plan: Plan) -> Subject:
    torch.manual_seed(oracle.SEED)
    leaves = [
        torch.randn(SIZE, SIZE).requires_grad_(requires_grad)
        for requires_grad in plan.requires_grad
    ]
    inputs, module = leaves[:NUM_INPUTS], torch.nn.Module()
    for i, weight in enumerate(leaves[NUM_INPUTS:]):
        parameter = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        module.register_parameter(f"weight{i}", parameter)

    def program(*given: Tensor) -> list[Tensor]:
        values = [*given, *(getattr(module, f"weight{i}") for i in range(NUM_WEIGHTS))]
        carry_out(plan.steps, values)
        newest = values[-4:]
        return [*newest, *(values[-1 - i % len(values)] for i in plan.outputs)]

    return Subject(program, tuple(inputs), module=module)


@random_programs(16)
@given(plan=plans(), way=st.sampled_from(Way), dtype=st.sampled_from(LOW_DTYPES))
def test_random_graph(plan: Plan, way: Way, dtype: torch.dtype) -> None:
    try:
        oracle.run_eager(as_subject(plan), as_subject(plan), way, dtype)
    except RuntimeError:
        return  # eager autocast cannot run every program: float16 and bfloat16 do not promote
    found = oracle.check(lambda: as_subject(plan), way, dtype)
    assert found is None, found

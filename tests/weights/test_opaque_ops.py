"""Custom ops of weights: no graph shows what their kernels read besides their arguments."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx.graphs import purity
from tests import needs
from tests.weights.keeping import TOLERANCE, batch, contents, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Op = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [needs.FROZEN_GRAPHS]

SCALE = torch.tensor(1.0)
STATE = {"calls": 0}


def by_tensor(w: torch.Tensor) -> torch.Tensor:
    return w * SCALE


def by_counter(w: torch.Tensor) -> torch.Tensor:
    STATE["calls"] += 1
    return w * STATE["calls"]


def by_chance(w: torch.Tensor) -> torch.Tensor:
    return w * torch.rand_like(w)


KERNELS = (by_tensor, by_counter, by_chance)
_library = torch.library.Library("amp_fx_opaque", "DEF")  # type: ignore[no-untyped-call]
OPS: dict[str, Op] = {}


def _define(kernel: Op) -> None:
    """Makes ops of a kernel, in each of the ways in which libraries do."""
    name = kernel.__name__
    for kind, fake in (("library", torch.empty_like), ("itself", lambda w: w)):
        full = f"{name}_{kind}"
        _library.define(f"{full}(Tensor w) -> Tensor")  # type: ignore[no-untyped-call]
        _library.impl(full, kernel, "CPU")  # type: ignore[no-untyped-call]
        _library.impl(full, fake, "Meta")  # type: ignore[no-untyped-call]
        OPS[full] = getattr(torch.ops.amp_fx_opaque, full)
    op = torch.library.custom_op(f"amp_fx_opaque::{name}", kernel, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, grad: grad)
    OPS[f"{name}_decorated"] = op


for _kernel in KERNELS:
    _define(_kernel)


class Opaque(nn.Module):
    """A product with what ops make of a weight."""

    def __init__(self, op: Op, *, num_calls: int = 1, is_trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(contents(0), requires_grad=is_trained)
        self.op, self.num_calls = op, num_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (functional.linear(x, self.op(self.weight)) for _ in range(self.num_calls))
        return sum(others, first)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    _reset()
    yield
    purity._registered.clear()


def _reset() -> None:
    SCALE.fill_(1.0)
    STATE["calls"] = 0


def run(program: Any, model: Opaque, *, with_gradients: bool) -> list[list[torch.Tensor]]:
    """Returns results of some calls; the state changes between them, and the weight once."""
    _reset()
    found = []
    for i in range(4):
        torch.manual_seed(i)
        x = batch().requires_grad_(with_gradients)
        with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", torch.bfloat16):
            out = program(x)
        results = [out.detach().float()]
        if with_gradients:
            wanted = [t for t in (x, model.weight) if t.requires_grad]
            results += torch.autograd.grad(out.float().sum(), wanted)
        found.append(results)
        SCALE.mul_(-1.5)
        if i == 2:
            model.weight.data.mul_(-2)
    return found


def check(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    errors = [error_of(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < TOLERANCE, errors


@pytest.mark.one_in(5)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(
    ("op", "compiler"),
    [
        *itertools.product(OPS, ["aot_eager"]),
        *itertools.product([op for op in OPS if "by_counter" in op], ["inductor", "eager"]),
    ],
)
def test_runs_in_every_call(op: str, compiler: str, *, with_gradients: bool) -> None:
    settings = {"is_trained": with_gradients and op.endswith("_decorated")}
    model, twin = Opaque(OPS[op], **settings), Opaque(OPS[op], **settings)
    program = torch.compile(model, backend="amp_fx", options={"compiler": compiler})
    expected = run(twin, twin, with_gradients=with_gradients)
    check(run(program, model, with_gradients=with_gradients), expected)


@pytest.mark.parametrize("op", ["by_counter_library", "by_chance_decorated"])
def test_runs_as_often_as_the_program_says(op: str) -> None:
    model, twin = Opaque(OPS[op], num_calls=2), Opaque(OPS[op], num_calls=2)
    program = torch.compile(model, backend="amp_fx")
    expected = run(twin, twin, with_gradients=False)
    check(run(program, model, with_gradients=False), expected)


def test_compiling_does_not_run_it() -> None:
    model = Opaque(OPS["by_counter_library"])
    program = torch.compile(model, backend="amp_fx")
    with torch.no_grad():
        program(batch())
    assert STATE["calls"] == 1


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_in_a_checkpoint(compiler: str) -> None:
    """A cast in there could pass for one of a weight that is read outside."""

    class Checkpointed(Opaque):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return result

    op = OPS["by_tensor_itself"]
    model, twin = Checkpointed(op), Checkpointed(op)
    program = torch.compile(model, backend="amp_fx", options={"compiler": compiler})
    check(run(program, model, with_gradients=True), run(twin, twin, with_gradients=True))


def test_what_is_made_of_its_result_is_not_kept_either() -> None:
    model = Opaque(OPS["by_counter_library"])
    with torch.no_grad():
        kept = amp_fx.explain(model)(batch()).graphs[0].cached_values
    assert not kept


def test_an_op_that_opted_in_runs_once_per_update() -> None:
    amp_fx.register_pure_op("amp_fx_opaque::by_counter_library")
    model = Opaque(OPS["by_counter_library"])
    program = torch.compile(model, backend="amp_fx")
    with torch.no_grad():
        [value] = amp_fx.explain(model)(batch()).graphs[0].cached_values
        assert "by_counter_library" in value.ops
        first = program(batch())
        num_calls = STATE["calls"]
        assert torch.equal(program(batch()), first)
        assert STATE["calls"] == num_calls
        model.weight.data.mul_(2)
        program(batch())
    assert STATE["calls"] == num_calls + 1

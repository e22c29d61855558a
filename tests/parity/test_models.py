"""Model by model on the CPU: amp_fx against eager ``torch.autocast``, bit for bit.

Compares outputs, losses, every gradient, and every parameter and buffer after the run, with and
without a region. Each case is a function of `tests.parity.models` that builds its subject from one
seed; its name says what it checks.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx.dtypes import dtype_name
from tests.parity import exceptions, oracle
from tests.parity.families import CASES
from tests.parity.oracle import LOW_DTYPES, Subject, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore")


def params() -> Iterator[Any]:
    """Every case in all combinations; the fast run takes them in turn, as that of ops does."""
    for number, (name, case) in enumerate(CASES.items()):
        combinations = list(itertools.product(case.ways, LOW_DTYPES))
        for i, (way, dtype) in enumerate(combinations):
            is_slow = i != number % len(combinations)
            where = f"{name}-{way.value}-{dtype_name(dtype)}"
            yield exceptions.param(exceptions.MODELS, name, way, dtype, id=where, is_slow=is_slow)


@pytest.mark.parametrize(("name", "way", "dtype"), list(params()))
def test_model(name: str, way: Way, dtype: torch.dtype) -> None:
    chosen = CASES[name]

    def build() -> Subject:
        torch.manual_seed(oracle.SEED)
        return chosen.build()

    found = oracle.check(build, way, dtype, **chosen.compile_options)
    assert found is None, found


INDUCTOR_CASES = (
    "decoder_only_with_tied_weights_and_loss",
    "resnet_and_its_running_stats",
    "autograd_function_in_float32",
    "unet",
    "lstm_cell",
)


def errors(exact: oracle.Result, result: oracle.Result) -> list[float]:
    """The largest error of each output and gradient, relative to the largest number in it."""
    assert exact.grads is not None
    assert result.grads is not None
    pairs = [*zip(exact.outputs, result.outputs, strict=True)]
    pairs += zip(exact.grads, result.grads, strict=True)
    return [
        float((a - b.double()).abs().max() / (a.abs().max() + 1e-12))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_errs_no_more_than_native(name: str, way: Way) -> None:
    """Errors against float64 stay within twice those of ``torch.compile`` under autocast."""
    dtype = torch.bfloat16

    def build(*, exact: bool = False) -> Subject:
        torch.manual_seed(oracle.SEED)
        subject = CASES[name].build()
        if exact:
            for module in (subject.program, subject.module):
                if isinstance(module, nn.Module):
                    module.double()
            subject.args = tuple(
                arg.detach().double().requires_grad_(arg.requires_grad)
                if arg.is_floating_point()
                else arg
                for arg in subject.args
            )
        return subject

    region = dtype if way is Way.AMBIENT else None
    exact = oracle.run(build(exact=True), None)
    oracle.reset()
    native = oracle.run(build(), dtype, torch.compile)
    oracle.reset()
    ours = oracle.run(
        build(), region, lambda f: oracle.compile_amp_fx(f, way, dtype, compiler="inductor")
    )
    for i, (found, allowed) in enumerate(
        zip(errors(exact, ours), errors(exact, native), strict=True)
    ):
        assert found <= 2 * allowed + 1e-2, f"leaf {i}: {found:g}, native {allowed:g}"

"""Model by model on the CPU: amp_fx against eager ``torch.autocast``, bit for bit.

Compares outputs, losses, every gradient, and every parameter and buffer after the run, with and
without a region. Each case is a function of `tests.parity.models` that builds its subject from one
seed; its name says what it checks.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.parity import exceptions, oracle
from tests.parity.families import CASES
from tests.parity.oracle import LOW_DTYPES, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.parity.oracle import Subject

pytestmark = pytest.mark.filterwarnings("ignore")


def params() -> Iterator[Any]:
    """Every case in all combinations; the fast run takes them in turn, as that of ops does."""
    for number, (name, case) in enumerate(CASES.items()):
        combinations = list(itertools.product(case.ways, LOW_DTYPES))
        for i, (way, dtype) in enumerate(combinations):
            is_slow = i != number % len(combinations)
            where = f"{name}-{way.value}-{dtype_name(dtype)}"
            yield exceptions.param(exceptions.MODELS, name, way, dtype, id=where, is_slow=is_slow)


def build(name: str) -> Subject:
    torch.manual_seed(oracle.SEED)
    return CASES[name].build()


@pytest.mark.parametrize(("name", "way", "dtype"), list(params()))
def test_model(name: str, way: Way, dtype: torch.dtype) -> None:
    options = CASES[name].compile_options
    found = oracle.check(functools.partial(build, name), way, dtype, **options)
    assert found is None, found


INDUCTOR_CASES = (
    "decoder_only_with_tied_weights_and_loss",
    "resnet_and_its_running_stats",
    "autograd_function_in_float32",
    "unet",
    "lstm_cell",
)


@pytest.mark.slow
@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_errs_no_more_than_native(name: str, way: Way) -> None:
    oracle.check_inductor(functools.partial(build, name), way, torch.bfloat16)

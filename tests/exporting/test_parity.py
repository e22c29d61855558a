"""Exported and loaded models against eager ``torch.autocast``, bit for bit."""

from __future__ import annotations

import pytest
import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError
from tests.exporting.oracle import NotExportableError, check
from tests.parity import oracle
from tests.parity.families import CASES
from tests.parity.oracle import LOW_DTYPES, Subject, Way

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = (
    "normalisations",
    "mixture_of_experts",
    "lstm",
    "resnet_and_its_running_stats",
    "cond",
    "in_place_ops",
    "buffers_written_to",
    "autograd_function_in_float32",
    "tied_weights",
    "nested_disabled_region",
    "transformer_encoder_eval",
    "multihead_attention",
    "branch_on_autocast_state",
    "dtype_dependent_python",
    "aliasing_outputs",
)

TRAINS = "weights_updated_between_calls"
REFUSED = (
    "vmap_of_shared_weight_only",
    "func_grad",
    "flex_attention_in_eval",
    "loop_that_carries_a_low_tensor",
    "grid_of_a_constant_transform",
)
"""Cases with an op that runs under autocast as a whole, which an exported program cannot do:
``test_export.py`` has the message."""


def names(*, are_quick: bool) -> list[str]:
    found = [name for name in CASES if (name in QUICK) == are_quick]
    return [name for name in found if name != TRAINS]


def verify(name: str, way: Way, dtype: torch.dtype) -> None:
    chosen = CASES[name]
    if way not in chosen.ways:
        pytest.skip("the other way only")

    def build() -> Subject:
        torch.manual_seed(oracle.SEED)
        return chosen.build()

    # What torch cannot write into a file: a tuple with a name.
    is_saved = name != "indexing_and_scatter"
    try:
        found = check(build, way, dtype, is_saved=is_saved)
    except NotExportableError as error:
        pytest.skip(f"torch.export cannot take it: {str(error).splitlines()[0]}")
    except UnsupportedError:
        assert name in REFUSED
        return
    assert found is None, found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", QUICK)
def test_model(name: str, way: Way) -> None:
    verify(name, way, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", names(are_quick=False))
def test_other_model(name: str, way: Way, dtype: torch.dtype) -> None:
    verify(name, way, dtype)

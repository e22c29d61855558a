"""Whole models by CUDA's tables: amp_fx against eager ``torch.autocast("cuda")``, bit for bit.

The cases of ``tests/parity/models`` with CUDA where the CPU stood. The inner compiler is
``"eager"``: what is compared are the casts, forward and backward, and the kept copies of weights.
Each case runs with gradients, and without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.cuda import needs

needs.start()

from tests.cuda.cases import build, cuda_cases  # noqa: E402
from tests.parity import oracle  # noqa: E402
from tests.parity.oracle import LOW_DTYPES, Way  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def params() -> list[Any]:
    return [
        pytest.param(name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}")
        for name, case in cuda_cases().items()
        for way in case.ways
        for dtype in LOW_DTYPES
    ]


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize(("name", "way", "dtype"), params())
def test_bits_of_eager_autocast(
    name: str, way: Way, dtype: torch.dtype, has_gradients: bool
) -> None:
    options = cuda_cases()[name].compile_options
    with torch.device("cuda"), torch.set_grad_enabled(has_gradients):
        try:
            oracle.run_eager(build(name), build(name), way, dtype)
        except RuntimeError as error:
            if has_gradients or "does not require grad" not in str(error):
                raise
            pytest.skip("the program runs a backward itself")
        found = oracle.check(lambda: build(name), way, dtype, **options)
    assert found is None, found

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
from tests.parity import exceptions, oracle  # noqa: E402
from tests.parity.oracle import LOW_DTYPES, Way  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def params() -> list[Any]:
    return [
        _param(name, way, dtype, has_gradients)
        for name, case in cuda_cases().items()
        for way in case.ways
        for dtype in LOW_DTYPES
        for has_gradients in (True, False)
    ]


def _param(name: str, way: Way, dtype: torch.dtype, has_gradients: bool) -> Any:
    """Returns a case; the CPU's exceptions, which are about sums of gradients, hold here too."""
    case = f"{name}-{way.value}-{dtype_name(dtype)}"
    table = exceptions.MODELS if has_gradients else {}
    marks = [pytest.mark.xfail(strict=True, reason=table[case])] if case in table else []
    values = name, way, dtype, has_gradients
    return pytest.param(*values, id=f"{case}-{has_gradients}", marks=marks)


@pytest.mark.parametrize(("name", "way", "dtype", "has_gradients"), params())
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

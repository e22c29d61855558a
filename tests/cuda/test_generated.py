"""Code that inductor generates for CUDA, executed: amp_fx against native autocast and eager mode.

Under the policy ``"torch"`` the numbers are those of the code that ``torch.compile`` generates
under ``torch.autocast``, bit for bit. Inductor rounds less often than eager mode: it keeps in
float32 what one kernel computes. So eager mode is compared within ``NUM_ROUNDINGS`` roundings to
the low dtype, relative to the largest number of a tensor.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.dtypes import dtype_name
from tests.cuda import needs

needs.start()

from tests.cuda.cuda_graphs import record_graphs  # noqa: E402
from tests.cuda.faults import FAULTS  # noqa: E402
from tests.cuda.nets import NETS, Tensors, differing, distances, run  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

pytestmark = [
    pytest.mark.usefixtures("_low_products"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

NUM_ROUNDINGS = 4
"""Roundings in a row, each by half a unit of the low dtype, that two ways may differ by."""

DTYPES = (torch.bfloat16, torch.float16)


NOISE = ("conv1.bias",)
"""Parameters that a norm behind them takes out again: their gradients are what rounding left."""


def tolerance(dtype: torch.dtype) -> float:
    return NUM_ROUNDINGS * torch.finfo(dtype).eps / 2


def compiled(**options: Any) -> Any:
    given = {"fallback": False, **options}
    return functools.partial(torch.compile, backend="amp_fx", options=given, dynamic=False)


def plain(model: nn.Module) -> nn.Module:
    return model


@functools.lru_cache(maxsize=2)
def eager(name: str, dtype: torch.dtype, is_trained: bool) -> Tensors:
    with torch._inductor.config.patch(fallback_random=True):
        return run(NETS[name], plain, dtype, is_trained=is_trained)


@functools.lru_cache(maxsize=2)
def native(name: str, dtype: torch.dtype, is_trained: bool) -> Tensors:
    with torch._inductor.config.patch(fallback_random=True):
        return run(NETS[name], torch.compile, dtype, is_trained=is_trained)


def ours(name: str, dtype: torch.dtype, is_trained: bool, **options: Any) -> Tensors:
    with torch._inductor.config.patch(fallback_random=True):
        return run(NETS[name], compiled(**options), dtype, is_trained=is_trained)


def assert_near(found: Tensors, expected: Tensors, allowed: float) -> None:
    pairs = distances(found, expected).items()
    assert not {n: d for n, d in pairs if d > allowed and not n.endswith(NOISE)}


CASES = [(name, is_trained) for name in NETS for is_trained in (True, False)]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("name", "is_trained"), CASES)
def test_bits_of_native_and_near_eager(name: str, is_trained: bool, dtype: torch.dtype) -> None:
    found = ours(name, dtype, is_trained)
    assert_near(found, eager(name, dtype, is_trained), tolerance(dtype))
    assert differing(found, native(name, dtype, is_trained)) == []


@pytest.mark.parametrize("options", [{"weight_cache": "training"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", NETS)
def test_bits_of_native_with(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    found = ours(name, dtype, True, **options)
    assert differing(found, native(name, dtype, True)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", NETS)
def test_lean_is_near_eager(name: str, dtype: torch.dtype) -> None:
    """Residual sums are low under it, which outputs and all gradients see: twice the roundings."""
    found = ours(name, dtype, True, policy="lean")
    assert_near(found, eager(name, dtype, True), 2 * tolerance(dtype))


def frozen_by_inductor(model: nn.Module) -> Any:
    """Compiles the model in each call, as what inductor froze stays as it is after a write."""

    def call(x: torch.Tensor) -> Any:
        torch._dynamo.reset()
        with torch._inductor.config.patch(freezing=True):
            return torch.compile(model)(x)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", NETS)
def test_bits_of_inductors_freezing(name: str, dtype: torch.dtype) -> None:
    """Frozen biases are rounded, and unfrozen ones are not; inductor always folds batch norms."""
    found = ours(name, dtype, False, freezing=True, fold_batch_norm=True)
    with torch._inductor.config.patch(fallback_random=True):
        expected = run(NETS[name], frozen_by_inductor, dtype, is_trained=False)
    assert differing(found, expected) == []


@pytest.mark.parametrize(("name", "is_trained"), CASES)
def test_bits_of_native_in_cuda_graphs(
    name: str, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached values are static inputs: a forward copies only the input of the model.

    The weights are written between the calls. Cached values keep their addresses, so that
    recordings stay valid.
    """
    dtype = torch.bfloat16
    graphs = record_graphs(monkeypatch)
    found = ours(name, dtype, is_trained, **{"triton.cudagraphs": True})
    assert graphs[0].num_copied == 1
    assert {graph.num_recordings for graph in graphs} == {1}
    assert differing(found, native(name, dtype, is_trained)) == []


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_stale_copy_would_be_seen(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are written between the calls: with the copies of the first, bits differ."""
    dtype = torch.bfloat16
    FAULTS["never refreshed"](monkeypatch)
    found = ours("mlp", dtype, is_trained)
    assert any(n.startswith("1 ") for n in differing(found, native("mlp", dtype, is_trained)))

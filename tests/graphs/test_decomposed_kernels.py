"""Kernels that are traced as the ops they call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo import config

from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 8),
    "two layers, both directions": lambda: nn.LSTM(8, 4, 2, bidirectional=True, dropout=0.0),
    "no bias, batch first": lambda: nn.LSTM(8, 8, bias=False, batch_first=True),
    "projections": lambda: nn.LSTM(8, 8, proj_size=4),
    "gru": lambda: nn.GRU(8, 8),
    "rnn": lambda: nn.RNN(8, 8),
}


@pytest.fixture(autouse=True)
def _captures_recurrent_networks() -> Iterator[None]:
    with config.patch(allow_rnn=True):
        yield


def trained(
    net: nn.Module, x: torch.Tensor, dtype: torch.dtype, *, is_bare: bool = False, **how: Any
) -> list[torch.Tensor]:
    """Returns the output and the gradients of one training step of a compiled net."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = net(x)[0]
        return y

    torch.compiler.reset()
    net.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    program = torch.compile(forward, fullgraph=True, **how) if how else forward
    with contextlib.nullcontext() if is_bare else torch.autocast("cpu", dtype):
        y = program(x)
    y.float().square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in (*net.parameters(), x)]
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def options(compiler: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"backend": "amp_fx", "options": {"compiler": compiler, "dtype": dtype}}


SLOW_INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", ["aot_eager", SLOW_INDUCTOR])
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_recurrent_networks_train(
    rng: torch.Generator, make: Callable[[], nn.Module], compiler: str
) -> None:
    """As eager autocast without oneDNN's LSTM, which AOTAutograd cannot differentiate.

    Natively, AOTAutograd decomposes the LSTM in the same way if its input requires gradients.
    """
    net, x = make(), torch.randn(3, 2, 8, generator=rng)
    tolerance = 0 if compiler == "aot_eager" else 1e-2
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        for dtype in (torch.bfloat16, torch.float16):
            expected = trained(net, x, dtype)
            found = trained(net, x, dtype, **options(compiler, dtype))
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs.PACKING
@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", SLOW_INDUCTOR])
@pytest.mark.parametrize("is_stored_low", [False, True])
@pytest.mark.parametrize("name", ["lstm", "two layers, both directions", "no bias, batch first"])
def test_all_results_have_the_dtypes_of_onednns_lstm(
    rng: torch.Generator, name: str, compiler: str, *, is_stored_low: bool
) -> None:
    net, x = NETS[name](), torch.randn(3, 2, 8, generator=rng)
    if is_stored_low:
        net, x = net.bfloat16(), x.bfloat16()
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        found = torch.compile(net, fullgraph=True, **options(compiler, torch.bfloat16))(x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_an_lstm_after_an_embedding_trains_in_a_float32_program(rng: torch.Generator) -> None:
    net = nn.Sequential(nn.Embedding(5, 8), nn.LSTM(8, 8))
    x = torch.randint(5, (3, 2), generator=rng)
    expected = trained(net, x, torch.bfloat16, backend="aot_eager")
    found = trained(net, x, torch.bfloat16, is_bare=True, **options("aot_eager", torch.bfloat16))
    assert torch.equal(found[0], expected[0].bfloat16().float())  # as oneDNN's results
    # Natively, each use of a weight has a cast of its own.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_an_lstm_runs_without_units(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without units for the dtype, oneDNN has no LSTM, and eager autocast raises."""
    monkeypatch.setattr("amp_fx.graphs.decomposed_kernels.has_product_kernels", lambda _: False)
    net, x = nn.LSTM(8, 8), torch.randn(3, 2, 8, generator=rng)
    expected = trained(net, x, torch.bfloat16, **options("aot_eager", torch.bfloat16))[0]
    with torch.no_grad():
        compiled = torch.compile(net, fullgraph=True, **options("aot_eager", torch.bfloat16))
        result = compiled(x)[0]
    torch.testing.assert_close(result, expected.float(), rtol=0, atol=0)

"""Kernels of accelerators cast the weights that they read whole, and biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import conv1d, embedding

from amp_fx.weights.kernel_reads import convolution_biases, read_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

READS: dict[str, tuple[Read, bool]] = {
    "its norm": (lambda w, *_: w.norm(), True),
    "elementwise": (lambda w, *_: w * w, True),
    "sums of its rows": (lambda w, *_: w.sum(1), True),
    "through a view": (lambda w, *_: torch.sum(w.view(-1) ** 2), True),
    "beside a cast": (lambda w, *_: w.bfloat16() @ w.bfloat16() + w.sum(), True),
    "a cast": (lambda w, *_: w.bfloat16(), False),
    "what a cast is left to round": (lambda w, *_: (w - w.bfloat16().float()).bfloat16(), False),
    "a part": (lambda w, *_: w[:2].sum(), False),
    "some rows": (lambda w, rows, _: embedding(rows, w), False),
    "a product": (lambda w, *_: w @ w, False),
    "by nothing": (lambda w, *_: w.view(-1), False),
    "with a gradient": (lambda w, _, gradient: w * gradient, False),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_a_weight_whole(name: str) -> None:
    read, is_whole = READS[name]

    def program(w: torch.Tensor, rows: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
        return read(w, rows, tangents)

    trace = make_fx(program, select_decomp_table(), tracing_mode="fake")
    graph = trace(torch.ones(4, 4), torch.zeros(3, dtype=torch.long), torch.ones(4, 4)).graph
    weight = graph.find_nodes(op="placeholder")[0]
    assert read_whole([weight]) == ({weight} if is_whole else set())


@pytest.mark.parametrize("is_read_elsewhere", [False, True])
def test_biases_of_convolutions(is_read_elsewhere: bool) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        low = bias.bfloat16()
        y = conv1d(x.bfloat16(), weight.bfloat16(), low)
        return y + low[:, None] if is_read_elsewhere else y

    trace = make_fx(program, select_decomp_table(), tracing_mode="fake")
    graph = trace(torch.ones(2, 4, 8), torch.ones(4, 4, 3), torch.ones(4)).graph
    _, weight, bias = graph.find_nodes(op="placeholder")
    assert convolution_biases([weight, bias]) == (set() if is_read_elsewhere else {bias})

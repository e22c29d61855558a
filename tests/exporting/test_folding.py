"""Programs with folded batch norms; ``test_onnx_file.py`` compares files with torch's folding."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import amp_fx
from tests.composed import Composed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@given(
    dims=st.integers(1, 3),
    is_affine=st.booleans(),
    has_bias=st.booleans(),
    is_off=st.booleans(),
    lists=st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=6, deadline=None)
def test_convolutions_that_share_a_weight(
    *, dims: int, is_affine: bool, has_bias: bool, is_off: bool, lists: str
) -> None:
    """Each use has its own folded weight, which the program stores instead of the original."""
    convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 1, bias=has_bias)
    kind: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    norms: list[Any] = [kind(4, affine=is_affine) for _ in range(2)]

    def shared(_: Any, x: Tensor) -> Tensor:
        off = torch.autocast(lists, enabled=False)
        with off if is_off else contextlib.nullcontext():
            for norm in norms:
                x = norm(convolution(x)).tanh()
            return x

    torch.manual_seed(1234)
    model = Composed(shared, convolution=convolution, norms=nn.ModuleList(norms))
    x = torch.randn(2, 4, *[3] * dims)
    for norm in norms:
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    program = amp_fx.export(
        model.eval(), (x,), device_type=lists, dtype=torch.bfloat16, fold_batch_norm=True
    )
    assert not any("norm" in str(node.target) for node in program.graph.nodes)
    assert len(program.state_dict) == 4
    with torch.no_grad():
        exact = model(x)
    assert (program.module()(x) - exact).norm() / exact.norm() < 2**-6

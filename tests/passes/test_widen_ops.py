"""widen_ops: ops compute in float32 and round where a runtime cannot do otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.widen_ops import WidenOps
from tests.exporting.graphs import exported
from tests.programs import graph_text


class Norm(nn.Module):
    """A low input with float32 weights, and a product that is low throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x @ x)
        return found


def low() -> Tensor:
    torch.manual_seed(1234)
    return torch.randn(4, 4, dtype=torch.bfloat16)


NORM = "matmul_f32, [4], p_norm_weight, p_norm_bias, 1e-05, False"


def test_golden() -> None:
    gm = exported(Norm(), low())
    [report] = run_passes(gm, [WidenOps()])
    assert report.counts == {"ops_widened": 1}
    assert graph_text(gm).splitlines() == [
        "graph(p_norm_weight: f32, p_norm_bias: f32, x: bf16)",
        "matmul: bf16 = aten.matmul.default(x, x)",
        "matmul_f32: f32 = aten._to_copy.default(matmul, dtype=torch.float32)",
        f"layer_norm: f32 = aten.layer_norm.default({NORM})",
        "layer_norm_bf16: bf16 = aten._to_copy.default(layer_norm, dtype=torch.bfloat16)",
        "return (layer_norm_bf16,)",
    ]


def test_all_ops_of_a_dtype_without_kernels() -> None:
    gm = exported(Norm(), low())
    assert WidenOps((torch.bfloat16,)).call(gm).counts == {"ops_widened": 2}
    assert not WidenOps((torch.bfloat16,)).call(gm).modified
    assert WidenOps((torch.float16,)).call(exported(Norm(), low())).counts["ops_widened"] == 1


class Promotes(nn.Module):
    """Mixtures whose results are as wide as the widest, and ops without a mixture."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        mixed = x + y, torch.where(y > 0, x, y), torch.cat([x, y]), x > y
        return *mixed, x.relu(), x.to(torch.float32)


def test_mixtures_become_casts() -> None:
    x, y = low(), torch.randn(4, 4)
    gm = exported(Promotes(), x, y)
    [report] = run_passes(gm, [WidenOps()])
    assert report.counts == {"ops_widened": 4}
    for found, expected in zip(gm(x, y), Promotes()(x, y), strict=True):
        assert found.dtype is expected.dtype
        assert found.equal(expected)
    assert not WidenOps().call(gm).modified


class Several(nn.Module):
    """Takes several results, and branches."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        values, indices = y.sort()
        z = torch.cond(x.sum() > 0, lambda v: v @ v, lambda v: v - 1, (y,))
        return y, values, indices, z


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_are_those_of_rounding_after_each_op(sign: int) -> None:
    x = low() * sign
    gm = exported(Several(), x)
    run_passes(gm, [WidenOps((torch.bfloat16,))])
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and "copy" not in str(node.target):
            assert not any(t.meta["val"].dtype == torch.bfloat16 for t in node.all_input_nodes)
    found, expected = gm(x.clone()), Several()(x.clone())
    torch.testing.assert_close(tuple(found), expected, rtol=0, atol=0)

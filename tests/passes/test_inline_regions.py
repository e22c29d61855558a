"""inline_regions: bodies go back where the regions stand, between markers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.inline_regions import InlineRegions
from tests.exporting.graphs import exported
from tests.programs import graph_text


class Regions(nn.Module):
    """A region with one inside of it that is off, under ``no_grad``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                z = (y.float() @ x).relu()
        return z + 1, y


class Region(nn.Module):
    """One region."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        return y.relu(), y


def test_golden() -> None:
    gm = exported(Region(), torch.randn(4, 4))
    [report] = run_passes(gm, [InlineRegions()])
    assert report.counts == {"regions_inlined": 1}
    assert graph_text(gm).splitlines() == [
        "graph(x)",
        "enter_autocast = _enter_autocast('cpu', torch.bfloat16, True, False)",
        "matmul = aten.matmul.default(x, x)",
        "exit_autocast = _exit_autocast(enter_autocast)",
        "relu = aten.relu.default(matmul)",
        "return (relu, matmul)",
    ]
    assert list(gm.children()) == []
    assert not InlineRegions().call(gm).modified


def test_regions_inside_of_each_other() -> None:
    gm = exported(Regions(), torch.randn(4, 4))
    run_passes(gm, [InlineRegions()])
    assert "wrap_with" not in graph_text(gm)
    assert list(gm.children()) == []
    torch.testing.assert_close(tuple(gm(x := torch.randn(4, 4))), Regions()(x), rtol=0, atol=0)


def test_what_was_captured_moves_to_where_passes_look() -> None:
    gm = exported(Regions(), torch.randn(4, 4))
    InlineRegions().call(gm)
    [matmul, _] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    assert matmul.meta["captured"].dtype == torch.bfloat16
    assert "val" not in matmul.meta


class Branch(nn.Module):
    """A region in a branch, and a branch in a region."""

    def forward(self, x: Tensor) -> Tensor:
        def low(v: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return (v @ v).float()

        with torch.autocast("cpu", torch.float16):
            found: Tensor = torch.cond(x.sum() > 0, low, lambda v: v + 1, (x,))
            return found


def test_bodies_of_branches_and_branches_in_bodies() -> None:
    gm = exported(Branch(), torch.randn(4, 4))
    run_passes(gm, [InlineRegions()])
    [cond] = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
    branch = gm.get_submodule(str(cond.args[1].target))
    assert "_enter_autocast('cpu', torch.bfloat16" in graph_text(branch)  # type: ignore[arg-type]
    assert "_enter_autocast('cpu', torch.float16" in graph_text(gm)
    for x in (torch.rand(4, 4), -torch.rand(4, 4)):
        torch.testing.assert_close(gm(x)[0], Branch()(x), rtol=0, atol=0)

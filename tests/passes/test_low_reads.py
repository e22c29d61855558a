"""Readers of weights that count as low, on single graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.passes.low_reads import LowRead, low_reads
from amp_fx.policies.policy import preset
from tests.programs import site

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Program = Callable[[torch.Tensor, torch.Tensor], Any]

LOW = torch.bfloat16


def read_of(program: Program) -> LowRead | None:
    """Returns how a program reads its second argument, in the graph after the passes."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run_passes(gm, captured_passes(preset("torch"), site(), restores_outputs=True), check=True)
        graphs.append(gm)
        return gm.forward

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    torch.compile(program, backend=backend, fullgraph=True)(x, w)
    [gm] = graphs
    return {node.name: read for node, read in low_reads(gm).items()}.get("l_w_")


@pytest.mark.parametrize(
    ("program", "num_casts", "is_direct"),
    [
        (lambda x, w: x @ w, 1, True),
        (lambda x, w: (x @ w) @ w, 1, True),  # eager autocast casts a leaf once
        (lambda x, w: x @ w.t().unsqueeze(0).squeeze(0), 1, False),
        (lambda x, w: [x[:, :4] @ part for part in w.split(4)], 2, False),
        (lambda x, w: x @ w.expand(2, 8, 8), 1, False),
    ],
)
def test_casts_are_found_through_views(program: Program, num_casts: int, is_direct: bool) -> None:
    assert read_of(program) == LowRead(LOW, num_casts, is_direct)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (x @ w) * w,
        lambda x, w: (x @ w, w.t()),
        lambda x, w: x @ w + w.t().exp(),
        lambda x, w: x @ w.clone(),
        lambda x, w: x @ w.to(torch.float64).float(),
        lambda x, w: (x @ w, w.detach().add_(1)),
        lambda x, w: (x @ w, w.to(torch.float16)),
        lambda x, w: x.view(w.shape),  # nobody reads it
        lambda x, w: torch.func.grad(lambda a: (a @ w).sum())(x),  # an opaque node
    ],
)
def test_any_other_reader_says_no(program: Program) -> None:
    assert read_of(program) is None


def test_a_graph_that_no_pass_has_seen_says_no() -> None:
    gm = fx.symbolic_trace(lambda x, w: torch.ops.aten._to_copy.default(w, dtype=LOW) @ x)
    assert low_reads(gm) == {}

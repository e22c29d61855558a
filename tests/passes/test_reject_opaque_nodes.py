"""reject_opaque_nodes: no opaque node is left in a region of an exported program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx.errors import UnsupportedError
from amp_fx.passes.reject_opaque_nodes import RejectOpaqueNodes
from tests.exporting.graphs import exported, with_casts
from tests.programs import graph_text


class Solves(nn.Module):
    """An op whose kernel casts inside."""

    def forward(self, x: Tensor) -> Any:
        return torch.linalg.pinv(x)


def test_the_node_its_place_and_the_reason_are_named() -> None:
    gm = with_casts(exported(Solves(), torch.randn(4, 4)))
    message = r"%\w*pinv.*\(the kernel of aten::linalg_pinv.*test_reject_opaque_nodes\.py:\d+"
    with pytest.raises(UnsupportedError, match=message):
        RejectOpaqueNodes().call(gm)


class Off(nn.Module):
    """Calls pinv in a disabled region."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return torch.linalg.pinv(x)


def test_what_autocast_does_not_touch_stays() -> None:
    gm = with_casts(exported(Off(), torch.randn(4, 4)))
    before = graph_text(gm)
    assert not RejectOpaqueNodes().call(gm).modified
    assert graph_text(gm) == before

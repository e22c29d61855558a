"""Exported programs as the passes get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_fx.backend.pipeline import run_passes
from amp_fx.exporting.rewriting import graph_to_rewrite
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.policies.policy import preset
from tests.programs import site

if TYPE_CHECKING:
    from torch import fx


def exported(model: nn.Module, *args: Tensor) -> fx.GraphModule:
    """Returns the graph that ``torch.export`` makes of a model, as a copy that passes may edit."""
    with torch.no_grad():
        return graph_to_rewrite(torch.export.export(model, args))


def with_casts(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns an exported graph in a region of bfloat16, with its casts shared."""
    names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    passes: list[Any] = [
        InlineRegions(),
        MarkRegions(site(is_grad_enabled=False)),
        InsertCasts(preset("torch")),
        HoistCasts(names),
        FoldCasts(),
    ]
    run_passes(gm, passes, check=True)
    return gm

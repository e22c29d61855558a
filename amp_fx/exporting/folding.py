"""Folds batch norms of exported programs into weights, which get other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.exporting.program import clean, tensors_by_input, with_graph, written_inputs
from amp_fx.graphs.metadata import CAPTURED, VALUE
from amp_fx.passes.fold_batch_norms import FoldBatchNorms
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.weights.prepare import run_node

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram

_FLOAT16_MAX = torch.finfo(torch.float16).max


def with_folded_batch_norms(program: ExportedProgram, gm: fx.GraphModule) -> ExportedProgram:
    """Returns a program without the batch norms that can be folded into convolutions.

    Weights that float16 could not represent are not folded.

    Args:
        program: A program before its rewrite.
        gm: A copy of its graph, which is edited.
    """
    written = written_inputs(program.graph_signature)
    weights = {
        name: tensor.detach()
        for name, tensor in tensors_by_input(program).items()
        if name not in written
    }
    values: dict[fx.Node, torch.Tensor] = {}
    folded: dict[fx.Node, torch.Tensor] = {}

    def value_of(node: fx.Node) -> torch.Tensor:
        if node.op == "placeholder":
            return weights[node.name]
        if node not in values:
            values[node] = run_node(node, {n: value_of(n) for n in node.all_input_nodes})
        return values[node]

    def is_in_range(node: fx.Node) -> bool:
        folded[node] = value_of(node)
        return bool((folded[node].abs() <= _FLOAT16_MAX).all())

    run_passes(gm, [InlineRegions()])
    for node in gm.graph.nodes:
        VALUE.put(node, CAPTURED.get(node))  # casts do not yet change the captured values
    run_passes(gm, [FoldBatchNorms(True, weights, is_in_range)])
    added = {}
    for node, value in folded.items():
        if node.users and node.op != "placeholder":
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                placeholder = gm.graph.placeholder(f"folded_{node.name}")
            placeholder.meta = dict(node.meta)
            node.replace_all_uses_with(placeholder)
            added[placeholder.name] = value
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in weights and not node.users:
            gm.graph.erase_node(node)
    clean(gm)
    return with_graph(program, gm, written, added)

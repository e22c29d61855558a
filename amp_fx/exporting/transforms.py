"""Refuses programs with ``torch.func`` transforms, whose inner tensors no pass can look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from amp_fx.errors import ExportError
from amp_fx.passes.refuse_islands import place_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MODULE = "torch._functorch"
"""The modules of the functions that ``torch.export`` records of a transform."""


def refuse_transforms(program: ExportedProgram) -> None:
    """Refuses what ``torch.vmap``, ``torch.func.grad`` and the like left in a program."""
    for module in program.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if _is_transform(node):
                raise ExportError(
                    f"{node.format_node()} is part of a torch.func transform{place_of(node)}. "
                    f"{_advice(program)}"
                )


def _is_transform(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return module.startswith(_MODULE) and name != "lazy_load_decompositions"


def _advice(program: ExportedProgram) -> str:
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, constants)):
        return "torch.export itself bakes such tensors in as constants: it cannot export it"
    return (
        "Have torch.export resolve it, and give what comes out: "
        "amp_fx.export(torch.export.export(model, args).run_decompositions({}))"
    )

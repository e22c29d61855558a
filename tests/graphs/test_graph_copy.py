"""graph_copy: Dynamo's graph stays as Dynamo made it."""

from __future__ import annotations

import torch
from torch import fx, nn

from amp_fx.graphs.bodies import copy_graph_module
from tests.programs import capture_program, graph_text


def test_copy_has_what_aotautograd_reads() -> None:
    """Relies on ``_param_name_to_source`` and ``_dynamo_source``, as Dynamo sets them."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: list[torch.Tensor]) -> object:
        found.append(gm)
        return gm.forward

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    [gm] = found
    copy = copy_graph_module(gm)
    assert copy._param_name_to_source is gm._param_name_to_source
    pairs = list(zip(gm.graph.nodes, copy.graph.nodes, strict=True))
    assert any(hasattr(old, "_dynamo_source") for old, _ in pairs)
    for old, new in pairs:
        assert getattr(new, "_dynamo_source", None) is getattr(old, "_dynamo_source", None)
        assert new.meta == old.meta
        assert new.meta is not old.meta
        assert new.name == old.name


def with_body(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    return result


def test_edits_do_not_reach_the_original() -> None:
    captured = capture_program(with_body, torch.ones(2, 2, requires_grad=True))
    body = captured.gm.get_submodule("wrap_body_0")
    assert isinstance(body, fx.GraphModule)
    before = graph_text(captured.gm), graph_text(body)
    copy = copy_graph_module(captured.gm)
    for module in (copy, copy.get_submodule("wrap_body_0")):
        assert isinstance(module, fx.GraphModule)
        for node in module.graph.nodes:
            node.meta.clear()
            node.args = ()
    assert (graph_text(captured.gm), graph_text(body)) == before

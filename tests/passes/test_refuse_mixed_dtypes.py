"""RefuseMixedDtypes: rejects the products that eager kernels reject, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.refuse_mixed_dtypes import MixedDtypesError, RefuseMixedDtypes
from tests.weights.aot_graphs import text

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten
MATRIX, VECTOR, BATCH = torch.ones(3, 3), torch.ones(3), torch.ones(2, 3, 3)
IMAGES, KERNEL = torch.ones(1, 3, 4, 4), torch.ones(2, 3, 2, 2)
CONVOLUTION = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
CALLS: dict[str, tuple[Any, Sequence[Any]]] = {
    "addmm": (aten.addmm.default, (VECTOR, MATRIX, MATRIX)),
    "addmv": (aten.addmv.default, (VECTOR, MATRIX, VECTOR)),
    "baddbmm": (aten.baddbmm.default, (BATCH, BATCH, BATCH)),
    "bmm": (aten.bmm.default, (BATCH, BATCH)),
    "convolution": (aten.convolution.default, (IMAGES, KERNEL, *CONVOLUTION)),
    "mm": (aten.mm.default, (MATRIX, MATRIX)),
    "mv": (aten.mv.default, (MATRIX, VECTOR)),
    "add": (aten.add.Tensor, (MATRIX, MATRIX)),
    "embedding": (aten.embedding.default, (MATRIX, torch.zeros(2, dtype=torch.long))),
}


def graph_of(op: Any, args: Sequence[Any]) -> fx.GraphModule:
    """Returns a graph with one call, whose tensors are inputs."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = []
    for i, arg in enumerate(args):
        nodes.append(graph.placeholder(f"x{i}") if isinstance(arg, torch.Tensor) else arg)
        if isinstance(arg, torch.Tensor):
            nodes[-1].meta["val"] = mode.from_tensor(arg)
    call = graph.call_function(op, tuple(nodes))
    graph.output((call,))
    return fx.GraphModule(nn.Module(), graph)


def is_accepted_by_kernel(op: Any, args: Sequence[Any]) -> bool:
    try:
        op(*args)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_accepts_what_kernels_accept(op: Any, args: Sequence[Any], is_mixed: bool) -> None:
    first, *others = args
    given = (first.bfloat16(), *others) if is_mixed else args
    gm = graph_of(op, given)
    before = text(gm.graph)
    if is_accepted_by_kernel(op, given):
        assert not RefuseMixedDtypes().call(gm).modified
    else:
        assert is_mixed
        with pytest.raises(MixedDtypesError, match=f"{op.__name__.split('.')[0]}.*several dtypes"):
            RefuseMixedDtypes().call(gm)
    assert text(gm.graph) == before


def test_bodies_are_searched_and_the_runner_passes_the_error_on() -> None:
    """The caller catches ``MixedDtypesError``, so it must not be wrapped in ``PassError``."""
    body = graph_of(*CALLS["mm"])
    first = body.graph.find_nodes(op="placeholder")[0]
    first.meta["val"] = first.meta["val"].bfloat16()
    root = nn.Module()
    root.body = body
    graph = fx.Graph()
    attribute = graph.get_attr("body")
    graph.output((graph.call_function(torch.ops.higher_order.cond, (True, attribute, attribute)),))
    with pytest.raises(MixedDtypesError):
        run_passes(fx.GraphModule(root, graph), [RefuseMixedDtypes()], check=False)

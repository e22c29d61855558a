"""Casts go in front of what moves elements; of real processes see ``tests/distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.tensor
from torch.fx.node import map_arg

from amp_fx.passes.narrow_gathers import NarrowGathers
from tests.traffic.collectives import collective_bytes
from tests.weights.aot_graphs import text, traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, fx

    Program = Callable[[Tensor], Any]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

c10d, prims = torch.ops._c10d_functional, torch.ops.prims
LOW = torch.bfloat16
PART = torch.randn(4, 8)


def gather(part: Tensor) -> Tensor:
    whole: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(part, 2, "0"))
    return whole


def narrowed(program: Program, part: Tensor = PART) -> tuple[fx.GraphModule, int]:
    """Returns a graph after the pass, checked, and the number of collectives that it narrowed."""
    gm = traced(program, part)
    dtypes = [node.meta["val"].dtype for node in gm.graph.output_node().all_input_nodes]
    count = NarrowGathers().call(gm).counts["gathers_narrowed"]
    gm.graph.lint()
    found = [node.meta["val"].dtype for node in gm.graph.output_node().all_input_nodes]
    assert found == dtypes
    for node in gm.graph.find_nodes(op="placeholder"):
        mode = node.meta["val"].fake_mode
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with mode:
                assert str(node.target(*args, **kwargs)) == str(node.meta["val"]), node
    assert not NarrowGathers().call(gm).modified
    return gm, count


def test_the_cast_goes_before_the_gather() -> None:
    assert collective_bytes(traced(gather, PART).graph) == 4 * 8 * 4
    gm, count = narrowed(lambda part: gather(part).to(LOW))
    assert count == 1
    assert [line.split(" = ")[-1] for line in text(gm.graph)] == [
        "placeholder",
        "aten._to_copy(part)",
        "_c10d_functional.all_gather_into_tensor(_to_copy_default, 2, 0)",
        "_c10d_functional.wait_tensor(all_gather_into_tensor)",
        "return wait_tensor",
    ]
    assert collective_bytes(gm.graph) == 4 * 8 * 2


COLLECTIVES: dict[str, tuple[Program, bool]] = {
    "all_gather": (lambda x: c10d.all_gather_into_tensor(x, 2, "0"), True),
    "all_to_all": (lambda x: c10d.all_to_all_single(x, [2, 2], [2, 2], "0"), True),
    "broadcast": (lambda x: c10d.broadcast(x, 0, "0"), True),
    "reduce_scatter": (lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, "0"), False),
    "all_reduce": (lambda x: c10d.all_reduce(x, "sum", "0"), False),
    "max": (lambda x: c10d.all_reduce(x, "max", "0"), False),
}


@pytest.mark.parametrize(("collective", "moves"), COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("is_aten", [True, False], ids=["aten", "prims"])
def test_only_what_moves_elements(collective: Program, moves: bool, is_aten: bool) -> None:
    def program(part: Tensor) -> Any:
        whole = c10d.wait_tensor(collective(part))
        return whole.to(LOW) if is_aten else prims.convert_element_type(whole, LOW)

    gm, count = narrowed(program)
    assert count == int(moves)
    assert collective_bytes(gm.graph) == 4 * 8 * (2 if moves else 4)


def several(part: Tensor) -> Any:
    both = c10d.all_gather_into_tensor_coalesced([part, part[:2]], 2, "0")
    return tuple(c10d.wait_tensor(each).to(LOW) for each in both)


def through_views(part: Tensor) -> Any:
    """The views by which DTensor gathers the second dimension."""
    whole = torch.cat(torch.split(gather(part), 4), 1)
    return whole.t().to(LOW), whole.view(64).to(LOW)


NARROWED: dict[str, tuple[Program, int, int]] = {
    "several at once": (several, 1, 6 * 8 * 2),
    "views": (through_views, 1, 4 * 8 * 2),
    "one gather of another": (lambda part: gather(gather(part)).to(LOW), 2, (4 + 8) * 8 * 2),
}


@pytest.mark.parametrize(("program", "number", "num_bytes"), NARROWED.values(), ids=NARROWED)
def test_what_is_narrowed(program: Program, number: int, num_bytes: int) -> None:
    gm, count = narrowed(program)
    assert count == number
    assert collective_bytes(gm.graph) == num_bytes


def test_what_was_low_is_not_cast_twice() -> None:
    gm, count = narrowed(lambda part: gather(part.float()).to(LOW), PART.to(LOW))
    assert count == 1
    gm.graph.eliminate_dead_code()
    assert "_to_copy" not in str(gm.graph)


LEFT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "read as it is": lambda whole, _: (whole.to(LOW), whole),
    "read in two dtypes": lambda whole, _: (whole.to(LOW), whole.half()),
    "read by an op": lambda whole, _: (whole.to(LOW), whole + 1),
    "put beside another": lambda whole, part: torch.cat([whole, part]).to(LOW),
    "seen as bits": lambda whole, _: whole.view(torch.int32).to(torch.int8),
    "widened": lambda whole, _: whole.double(),
}


@pytest.mark.parametrize("read", LEFT.values(), ids=LEFT)
def test_left_alone(read: Callable[[Tensor, Tensor], Any]) -> None:
    gm, count = narrowed(lambda part: read(gather(part), part))
    assert count == 0
    assert collective_bytes(gm.graph) == 4 * 8 * 4

"""Casts go in front of what moves elements; of real processes see ``tests/distributed``."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from amp_fx.passes.narrow_gathers import NarrowGathers
from tests.traffic.collectives import collective_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

aten, c10d, prims = torch.ops.aten, torch.ops._c10d_functional, torch.ops.prims
LOW = torch.bfloat16


class Building:
    """A graph of AOTAutograd's kind, built op by op on fake tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def given(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value(node)
        return node

    def value(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with self.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def cast(self, node: fx.Node, dtype: torch.dtype = LOW) -> fx.Node:
        return self.op(aten._to_copy.default, node, dtype=dtype)

    def gather(self, node: fx.Node) -> fx.Node:
        whole = self.op(c10d.all_gather_into_tensor.default, node, 2, "0")
        return self.op(c10d.wait_tensor.default, whole)

    def done(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def narrowed(self, *outputs: fx.Node) -> tuple[fx.GraphModule, int]:
        """The graph after the pass, checked, and the number of collectives that it narrowed."""
        gm = self.done(*outputs)
        dtypes = [node.meta["val"].dtype for node in outputs]
        count = NarrowGathers().call(gm).counts["gathers_narrowed"]
        gm.graph.lint()
        assert [n.meta["val"].dtype for n in gm.graph.output_node().args[0]] == dtypes  # type: ignore[union-attr]
        for node in gm.graph.nodes:
            if node.op == "call_function":
                assert str(self.value(node)) == str(node.meta["val"]), node
        assert not NarrowGathers().call(gm).modified
        return gm, count


def test_the_cast_goes_before_the_gather() -> None:
    b = Building()
    gm, count = b.narrowed(b.cast(b.gather(b.given("part", 4, 8))))
    assert count == 1
    assert [getattr(n.target, "__name__", n.target) for n in gm.graph.nodes] == [
        "part",
        "_to_copy.default",
        "all_gather_into_tensor.default",
        "wait_tensor.default",
        "output",
    ]
    assert collective_bytes(gm.graph) == 4 * 8 * 2


def test_bytes_before() -> None:
    b = Building()
    assert collective_bytes(b.done(b.gather(b.given("part", 4, 8))).graph) == 4 * 8 * 4


COLLECTIVES: dict[str, Callable[[Building, fx.Node], fx.Node]] = {
    "all_gather": lambda b, x: b.op(c10d.all_gather_into_tensor.default, x, 2, "0"),
    "all_to_all": lambda b, x: b.op(c10d.all_to_all_single.default, x, [2, 2], [2, 2], "0"),
    "broadcast": lambda b, x: b.op(c10d.broadcast.default, x, 0, "0"),
    "reduce_scatter": lambda b, x: b.op(c10d.reduce_scatter_tensor.default, x, "sum", 2, "0"),
    "all_reduce": lambda b, x: b.op(c10d.all_reduce.default, x, "sum", "0"),
    "max": lambda b, x: b.op(c10d.all_reduce.default, x, "max", "0"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("how", ["aten", "prims"])
def test_only_what_moves_elements(name: str, how: str) -> None:
    b = Building()
    wait = b.op(c10d.wait_tensor.default, COLLECTIVES[name](b, b.given("part", 4, 8)))
    cast = b.cast(wait) if how == "aten" else b.op(prims.convert_element_type.default, wait, LOW)
    gm, count = b.narrowed(cast)
    moves = name in ("all_gather", "all_to_all", "broadcast")
    assert count == int(moves)
    assert collective_bytes(gm.graph) == 4 * 8 * (2 if moves else 4)


def test_several_at_once() -> None:
    b = Building()
    parts = [b.given("first", 4, 8), b.given("second", 2, 8)]
    both = b.op(c10d.all_gather_into_tensor_coalesced.default, parts, 2, "0")
    whole = [b.op(c10d.wait_tensor.default, b.op(operator.getitem, both, i)) for i in range(2)]
    gm, count = b.narrowed(*[b.cast(each) for each in whole])
    assert count == 1
    assert collective_bytes(gm.graph) == 6 * 8 * 2


def test_views_carry_it_on() -> None:
    """Narrows across the views by which DTensor gathers the second dimension."""
    b = Building()
    pieces = b.op(aten.split.Tensor, b.gather(b.given("part", 4, 8)), 4)
    halves = [b.op(operator.getitem, pieces, i) for i in range(2)]
    whole = b.op(aten.cat.default, halves, 1)
    again = b.op(aten.t.default, whole)
    _, count = b.narrowed(b.cast(again), b.cast(b.op(aten.view.default, whole, [64])))
    assert count == 1


def test_one_gather_of_another() -> None:
    b = Building()
    gm, count = b.narrowed(b.cast(b.gather(b.gather(b.given("part", 4, 8)))))
    assert count == 2
    assert collective_bytes(gm.graph) == (4 + 8) * 8 * 2


def test_what_was_low_is_not_cast_twice() -> None:
    b = Building()
    low = b.given("part", 4, 8, dtype=LOW)
    gm, count = b.narrowed(b.cast(b.gather(b.cast(low, torch.float32))))
    assert count == 1
    gm.graph.eliminate_dead_code()
    assert not gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)


def read_as_it_is(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(whole), whole]


def read_in_two_dtypes(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(whole), b.cast(whole, torch.float16)]


def read_by_an_op(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(whole), b.op(aten.add.Tensor, whole, 1.0)]


def put_beside_another(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.cat.default, [whole, b.given("other", 8, 8)]))]


def seen_as_bits(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.view.dtype, whole, torch.int32), torch.int8)]


def widened(b: Building, whole: fx.Node) -> list[fx.Node]:
    return [b.cast(whole, torch.float64)]


@pytest.mark.parametrize(
    "read",
    [read_as_it_is, read_in_two_dtypes, read_by_an_op, put_beside_another, seen_as_bits, widened],
)
def test_what_is_left_alone(read: Callable[[Building, fx.Node], list[fx.Node]]) -> None:
    b = Building()
    outputs = read(b, b.gather(b.given("part", 4, 8)))
    gm, count = b.narrowed(*outputs)
    assert count == 0
    assert collective_bytes(gm.graph) == 4 * 8 * 4

"""Notes the values of captured graphs, so that two runs of one program can be compared.

An op after each node copies the value and notes it; its backward notes the gradient. Compilers
neither fuse this op nor leave it out, so one mechanism serves all of them. Each kernel between two
notes computes one op: what differs only because a kernel fuses several ops is equal here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.locations import NodeLocation, location_of
from amp_fx.graphs.metadata import CAST
from amp_fx.graphs.values import recorded_value, set_value, storage_id
from amp_fx.numerics.equality import compare, relative_error
from amp_fx.numerics.trace_diff import OpDifference
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.regions.module_stack import CompileFrame


Place = tuple[NodeLocation, str]
"""A location, and the name of an op."""


class Notes:
    """The values that the graphs of one run note, in order.

    Attributes:
        values: For each value, the number of its node, the stage, and the value or the gradient.
        nodes: For each node, its graph and name, and the location and the op by stage. The backward
            that computes a gradient is that of the node that reads the value.
    """

    def __init__(self) -> None:
        self.values: list[tuple[int, str, torch.Tensor]] = []
        self.num_graphs = 0
        self.nodes: list[tuple[tuple[int, str], dict[str, Place]]] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Context manager for the run whose values are noted."""
        _taking.append(self)
        try:
            yield
        finally:
            _taking.pop()

    def in_graph(self, frame: CompileFrame) -> NoteValues:
        """Returns the pass for the next captured graph."""
        self.num_graphs += 1
        return NoteValues(self, self.num_graphs, frame)


def first_difference(expected: Notes, actual: Notes) -> OpDifference | None:
    """Returns the first op whose values in two runs differ.

    It is named by the op that only the second run has directly before, if there is one.
    """
    remaining = defaultdict(list)
    for number, stage, value in expected.values:
        remaining[expected.nodes[number][0], stage].append(value)
    added = None
    for number, stage, value in actual.values:
        name, places = actual.nodes[number]
        values = remaining[name, stage]
        if not values:
            added = added or (stage, *places[stage])
            continue
        found = compare(places[stage][1], values[0], value)
        if found is not None:
            at, location, op = added or (stage, *places[stage])
            place = at, location.module, op, location.source
            dtypes = dtype_name(values[0].dtype), dtype_name(value.dtype)
            return OpDifference(*place, dtypes, found, relative_error([(values[0], value)]), 0.0)
        del values[0]
        added = None
    return None


@dataclasses.dataclass(frozen=True)
class NoteValues:
    """Adds a note after each node that computes a floating-point tensor.

    Before: ``y = tanh(x); return y``
    After: ``y = tanh(x); noted = note(y, 0); return noted``

    Leaves alone: casts that amp_fx inserted, and views, which are parts of other nodes' values.
    """

    notes: Notes
    graph: int
    frame: CompileFrame
    name: ClassVar[str] = "note_values"

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Adds the notes."""
        counts: Counter[str] = Counter()
        nodes = [node for node in gm.graph.nodes if _is_computed(node)]
        if gm.graph.find_nodes(op="call_function", target=NOTE):
            nodes = []
        for node in nodes:
            key = len(self.notes.nodes)
            readers = [user for user in node.users if user.op != "output"]
            maker = readers[0] if len(readers) == 1 else node
            places = {"forward": self._place(node), "backward": self._place(maker)}
            self.notes.nodes.append(((self.graph, node.name), places))
            with gm.graph.inserting_after(node):
                noted = gm.graph.call_function(NOTE, (node, key))
            noted.meta = dict(node.meta)
            set_value(noted, recorded_value(node))
            node.replace_all_uses_with(noted, lambda user, noted=noted: user is not noted)
            counts["noted"] += 1
        return PassResult(counts)

    def _place(self, node: fx.Node) -> Place:
        name = getattr(node.target, "__name__", str(node.target))
        return location_of(node, self.frame), name.partition(".")[0]


def _is_computed(node: fx.Node) -> bool:
    """Returns True if a node computes a floating-point tensor in memory of its own."""
    value = recorded_value(node)
    if not node.op.startswith("call_") or not isinstance(value, torch.Tensor):
        return False
    given = [recorded_value(each) for each in node.all_input_nodes]
    # A pass that adds an op often gives it the recorded value of its input.
    others = [each for each in given if isinstance(each, torch.Tensor) and each is not value]
    stored = [storage_id(each) for each in others]
    is_own = value.is_floating_point() and storage_id(value) not in stored
    return is_own and not CAST.is_on(node)


_taking: list[Notes] = []
"""The notes of the running program."""


@torch.library.custom_op("amp_fx::note", mutates_args=())
def _note(value: torch.Tensor, key: int, is_gradient: bool = False) -> torch.Tensor:
    stage = "backward" if is_gradient else "forward"
    _taking[-1].values.append((key, stage, value.clone()))
    return value.clone()


@_note.register_fake
def _fake_note(value: torch.Tensor, key: int, is_gradient: bool = False) -> torch.Tensor:
    del key, is_gradient
    return torch.empty_like(value)


def _save_key(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.key = inputs[1]


def _note_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _note(gradient, ctx.key, True), None, None


_note.register_autograd(_note_gradient, setup_context=_save_key)
NOTE = torch.ops.amp_fx.note.default

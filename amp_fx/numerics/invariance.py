"""Compares a batch with each of its rows alone, and names the first op whose rows differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from amp_fx.backend.entry import called_in
from amp_fx.backend.isolated_rows import composites_isolated, isolating
from amp_fx.backend.rewrite import Reporting, rewrite
from amp_fx.explanation.running import optimized
from amp_fx.graphs.bodies import with_attributes_as_inputs
from amp_fx.graphs.places import op_name, place_of
from amp_fx.numerics.equality import Difference, compare
from amp_fx.numerics.locate import Place, copied
from amp_fx.options import Options
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.aot_autograd import aot_autograd, make_boxed_func

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

CAUSE = "rows are not independent: a row has other bits in a batch than alone"


class Comparison(NamedTuple):
    """Holds what was compared, what differs, and the first op that does."""

    num_compared: int
    differences: tuple[Difference, ...]
    first: Place | None


class Step(NamedTuple):
    """Holds a node that ran, and its value."""

    node: fx.Node
    value: torch.Tensor


def compare_rows(
    step: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Mapping[str, Any],
    region: Callable[[], AbstractContextManager[Any]],
) -> Comparison:
    """Runs a batch and each of its rows alone, without gradients.

    Args:
        step: The program.
        compiled: The same program, compiled.
        inputs: Arguments; tensors with as many rows as the first one are the batch.
        options: Options of the backend.
        region: The autocast region of each run.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    size = next((tensor.size(0) for tensor in tensors if tensor.dim()), 0)

    def row(index: int) -> Any:
        def taken(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = tensor.dim() and tensor.size(0) == size
            return tensor[index : index + 1] if is_batch else tensor

        return pytree.tree_map_only(torch.Tensor, taken, inputs)

    def run(program: Callable[..., Any], given: Any) -> list[Any]:
        args, kwargs = copied(given)
        with torch.no_grad(), region():
            return [x for x in pytree.tree_leaves(program(*args, **kwargs)) if _is_float(x)]

    whole = run(compiled, inputs)
    found: list[Difference] = []
    for index in range(size):
        pairs = enumerate(zip(run(compiled, row(index)), whole, strict=True))
        compared = (
            _difference(f"output {i} of row {index}", one, batch, index)
            for i, (one, batch) in pairs
        )
        found += filter(None, compared)
    first = None
    if found:
        of_batch = _recorded(step, inputs, options, run)
        rows = ((i, _recorded(step, row(i), options, run)) for i in range(size))
        first = next((p for i, steps in rows if (p := _first(steps, of_batch, i))), None)
    return Comparison(size * len(whole), tuple(found), first)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _difference(
    what: str, alone: torch.Tensor, batch: torch.Tensor, index: int
) -> Difference | None:
    """Compares a row alone with its part of a batch; None if they are equal or not comparable."""
    if not alone.dim() or alone.shape[1:] != batch.shape[1:] or batch.size(0) == alone.size(0):
        return None
    return compare(what, alone, batch[index * alone.size(0) : (index + 1) * alone.size(0)])


def _first(alone: Sequence[Step], batch: Sequence[Step], index: int) -> Place | None:
    for (node, value), (same, in_batch) in zip(alone, batch, strict=False):
        if node.target != same.target:
            break  # the program goes on otherwise with one row
        difference = _difference(node.name, value, in_batch, index)
        if difference is not None:
            place = place_of(node)
            source = f"{place.file}:{place.line}: {place.code}" if place.file else ""
            return Place("forward", node.name, op_name(node), place.module, source, difference)
    return None


def _recorded(
    step: Callable[..., Any],
    inputs: Any,
    options: Mapping[str, Any],
    run: Callable[[Callable[..., Any], Any], Any],
) -> list[Step]:
    """Runs a program op by op, as AOTAutograd's graphs have it, and returns the values of nodes."""
    found: list[Step] = []
    parsed = Options.parse({**options, "compiler": "aot_eager"})

    def record(gm: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[..., Any]:
        return make_boxed_func(_Recorder(gm, found).run)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, attributes = with_attributes_as_inputs(gm)
        given = [*example_inputs, *attributes]
        rewritten = rewrite(gm, given, parsed, Reporting())
        compiler = aot_autograd(fw_compiler=isolating(record, parsed))
        with no_autocast(), composites_isolated(parsed):
            compiled = compiler(rewritten.gm, given)
        return called_in(no_autocast, lambda *args: compiled(*args, *attributes))

    run(optimized(backend)(step), inputs)
    return found


class _Recorder(fx.Interpreter):
    """Runs a graph op by op, and adds the floating-point tensors of its nodes to a list."""

    def __init__(self, gm: fx.GraphModule, found: list[Step]) -> None:
        super().__init__(gm)
        self.found = found

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node."""
        value = super().run_node(n)
        if _is_float(value) and n.op == "call_function":
            self.found.append(Step(n, value.detach().clone()))
        return value

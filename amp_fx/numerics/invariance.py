"""Compares a batch with each of its rows alone, and names the first op whose rows differ."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.numerics.equality import Difference, compare
from amp_fx.numerics.graph_trace import traced
from amp_fx.numerics.trace import Trace, TracedOp
from amp_fx.numerics.trace_diff import OpDifference, op_differences
from amp_fx.numerics.trial import copied
from amp_fx.options import Options
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from amp_fx.numerics.trial import Trial

CAUSE = "rows are not independent: a row has other bits in a batch than alone"


class RowComparison(NamedTuple):
    """Holds what was compared, what differs, and the first op that does."""

    num_compared: int
    differences: tuple[Difference, ...]
    first: OpDifference | None


def compare_rows(
    trial: Trial, compiled: Callable[..., Any], options: Mapping[str, Any]
) -> RowComparison:
    """Runs a batch and each of its rows alone, without gradients.

    Args:
        trial: The program; tensors with as many rows as the first one are the batch.
        compiled: The same program, compiled.
        options: Options of the backend.
    """
    inputs = (trial.args, trial.kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    size = next((tensor.size(0) for tensor in tensors if tensor.dim()), 0)

    def row(index: int) -> Any:
        def taken(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = tensor.dim() and tensor.size(0) == size
            return tensor[index : index + 1] if is_batch else tensor

        return pytree.tree_map_only(torch.Tensor, taken, inputs)

    def run(program: Callable[..., Any], given: Any) -> list[torch.Tensor]:
        args, kwargs = copied(given)
        with torch.no_grad(), trial.region():
            outputs = pytree.tree_leaves(program(*args, **kwargs))
        return [x for x in outputs if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def trace(given: Any) -> Trace:
        found = Trace("")
        run(traced(trial.step, found, Options.parse({**options, "compiler": "aot_eager"})), given)
        return found

    whole = run(compiled, inputs)
    found: list[Difference] = []
    for index in range(size):
        for place, (one, batch) in enumerate(zip(run(compiled, row(index)), whole, strict=True)):
            values = _rows(one.shape, batch, index)
            if values is not None:
                found += filter(None, [compare(f"output {place} of row {index}", one, values)])
    first = None
    if found:
        of_batch = trace(inputs)
        rows = ((index, trace(row(index))) for index in range(size))
        several = (op_differences(alone, of_batch, _Rows(i).part) for i, alone in rows)
        first = next(itertools.chain.from_iterable(several), None)
    return RowComparison(size * len(whole), tuple(found), first)


class _Rows(NamedTuple):
    """The rows of a batch that one of its rows, run alone, is compared with."""

    number: int

    def part(self, alone: TracedOp, batch: TracedOp) -> torch.Tensor | None:
        """Returns the part of a result; None if it is not comparable."""
        return _rows(alone.shape, batch.values.reshape(batch.shape), self.number)


def _rows(shape: tuple[int, ...], batch: torch.Tensor, index: int) -> torch.Tensor | None:
    """Returns the rows of a batch that belong to one of its rows; None if it has none."""
    if not shape or tuple(shape[1:]) != batch.shape[1:] or batch.size(0) == shape[0]:
        return None
    return batch[index * shape[0] : (index + 1) * shape[0]]

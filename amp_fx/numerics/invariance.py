"""Compares a batch with each of its rows alone, and finds the first op whose rows differ."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.numerics.equality import Difference, compare
from amp_fx.numerics.graph_trace import traced
from amp_fx.numerics.trace import Trace, TracedOp
from amp_fx.numerics.trace_diff import op_differences
from amp_fx.numerics.trial import copied
from amp_fx.options import Options
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from amp_fx.numerics.trial import Trial

CAUSE = "rows are not independent: a row has other bits in a batch than alone"


def compare_rows(
    trial: Trial, compiled: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs a batch and each of its rows alone, without gradients; returns fields of a report.

    Args:
        trial: The program; inputs with as many rows as the first one are the batch.
        compiled: The same program, compiled.
        options: Options of the backend.
    """
    inputs = (trial.args, trial.kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    size = next((tensor.size(0) for tensor in tensors if tensor.dim()), 0)

    def row(index: int) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = tensor.dim() and tensor.size(0) == size
            return tensor[index : index + 1] if is_batch else tensor

        return pytree.tree_map_only(torch.Tensor, take, inputs)

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
        several = (op_differences(a, of_batch, functools.partial(_part, i)) for i, a in rows)
        first = next(itertools.chain.from_iterable(several), None)
    return {
        "num_compared": size * len(whole),
        "differences": tuple(found),
        "first": first,
        "cause": CAUSE if found else "",
        "reference": "those of each row alone",
    }


def _part(index: int, alone: TracedOp, batch: TracedOp) -> torch.Tensor | None:
    """Returns the part of a batch's result that is compared with that of a row alone."""
    return _rows(alone.shape, batch.values.reshape(batch.shape), index)


def _rows(shape: tuple[int, ...], batch: torch.Tensor, index: int) -> torch.Tensor | None:
    """Returns the part of a batch for one of its rows; None if the shape has no batch dimension."""
    if not shape or tuple(shape[1:]) != batch.shape[1:] or batch.size(0) == shape[0]:
        return None
    return batch[index * shape[0] : (index + 1) * shape[0]]

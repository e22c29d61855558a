"""Tests whether ops accept the mixtures of dtypes that a rewrite produces.

Without an ambient region, Dynamo captures dtypes that Python code reads as float32, as in
``torch.zeros(n, dtype=x.dtype).index_add_(0, index, source)``. After the rewrite, another input of
the op may be low. Some ops promote, some accept mixtures on purpose (``batch_norm``), others raise,
and fake kernels do not show which. The real kernel is therefore run on zeros, once per op and
mixture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from amp_fx.graphs.range_guard import name_of
from amp_fx.graphs.sizes import hint, num_elements
from amp_fx.graphs.values import call_target, captured_value, tensors_in, value_of
from amp_fx.regions.state import no_autocast

_PROMOTING = frozenset(
    name + suffix for name in ("add", "sub", "mul", "div", "truediv") for suffix in ("", "_")
) | frozenset(("iadd", "isub", "imul", "itruediv", "getitem", "setitem"))

_MAX_ELEMENTS = 2**26
"""Maximum number of elements to test with: 256 MB of zeros."""


class MixtureProbe:
    """Tests of one graph's ops, each run once."""

    def __init__(self) -> None:
        self._results: dict[Any, bool] = {}

    def takes(self, node: fx.Node) -> bool:
        """Returns True if a node's op accepts the current dtypes of its inputs.

        Also returns True if the dtypes are equal, or if the op cannot run on this machine even
        with the captured dtypes.
        """
        dtypes = tuple(t.dtype for n in node.all_input_nodes for t in tensors_in(value_of(n)))
        if len({d for d in dtypes if d.is_floating_point}) < 2 or name_of(node) in _PROMOTING:
            return True
        key = (node.op, node.target, dtypes)
        if key not in self._results:
            self._results[key] = _runs(node, value_of) or not _runs(node, captured_value)
        return self._results[key]


def _runs(node: fx.Node, value: Any) -> bool:
    """Returns True if a node's op runs on the CPU, on zeros with the metadata of its inputs."""
    inputs = {n: value(n) for n in node.all_input_nodes}
    if sum(num_elements(t) for t in tensors_in(list(inputs.values()))) > _MAX_ELEMENTS:
        return True
    zeros = {n: map_aggregate(v, _zeros_like) for n, v in inputs.items()}
    args, kwargs = map_arg((node.args, node.kwargs), zeros.__getitem__)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), no_autocast():
            call_target(node, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def _zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros([hint(size) for size in value.size()], dtype=value.dtype)
    return hint(value)

"""Computes cached values of fake weights, which have no storage that could be watched."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import tensors_in
from amp_fx.replaced import replaced
from amp_fx.weights.aliases import is_view
from amp_fx.weights.call import CachedCall, flattened
from amp_fx.weights.prepare import run_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import fx

    from amp_fx.weights.prepare import CachedValueSpec

    Weights = tuple[torch.Tensor, ...]
    Made = tuple[int, int, int, bool]


class FakeCache:
    """Values that graphs are called with, and what computing them moves.

    Each value of the same weights counts once, whichever graphs are called with it.
    """

    def __init__(self) -> None:
        self._values: dict[Any, tuple[CachedValueSpec, Weights]] = {}
        self._packed: dict[int, Any] = {}

    @property
    def is_packed(self) -> bool:
        """True if a graph was compiled with packed weights."""
        return bool(self._packed)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Takes fake tensors for weights, and calls graphs with values that are computed anew."""
        from torch._inductor import config

        from amp_fx.backend import lower as module

        lower: Any = module
        compile_packed = lower.compile_packed

        def compile_fake(
            gm: Any, inputs: Any, passed: Any, constants: Any, compile_graph: Any, **kwargs: Any
        ) -> Any:
            runs = []

            def compile_counted(*args: Any, **given: Any) -> Any:
                runs.append(compile_graph(*args, **given))
                return runs[-1].compiled

            found = compile_packed(gm, inputs, passed, constants, compile_counted, **kwargs)
            self._packed[id(found[0].code)] = found[0], runs[-1]
            return found

        def call(this: CachedCall, given: list[Any]) -> Any:
            return self._call(this, given)

        with (
            # On CPUs without oneDNN's packed weights, whose ops take no fake tensors.
            config.patch({"cpp.weight_prepack": False}),
            replaced(
                (lower, "FakeTensor", _NoTensor),
                (lower, "constants_for", _fake_constants),
                (lower, "compile_packed", compile_fake),
                (CachedCall, "__call__", call),
            ),
        ):
            yield

    def _call(self, call: CachedCall, given: list[Any]) -> Any:
        args = tuple(given)
        given.clear()
        values = []
        spec: Any
        for spec in call.specs:
            weights = tuple(args[i].detach() for i in spec.positions)
            values.append(weights[0] if spec.is_alias else spec.make(weights))
            if not spec.is_alias:
                key = tuple(id(args[i]) for i in spec.positions), spec.key(weights)
                self._values[key] = spec, weights
        inputs = [*(args[i] for i in call.passed), *flattened(values[call.num_constants :])]
        _, run = self._packed.get(id(call._compiled), (None, call._compiled))
        return run(inputs)

    def casts(self) -> list[Made]:
        """Lists what is computed op by op, each a launch, as ``totals.totals`` takes it."""
        found: list[Made] = []
        for spec, weights in self._values.values():
            if spec.is_cast:
                (weight,), low = weights, spec.make(weights)
                sizes = weight.element_size(), low.element_size()
                found.append((low.numel(), *sizes, low.stride() == weight.stride()))
            else:
                found += _ops_of(spec, weights)
        return found


def _ops_of(spec: CachedValueSpec, weights: Weights) -> list[Made]:
    """Lists what each op that computes a value reads and writes; views do neither."""
    found = []
    fakes = iter(weights)
    values: dict[fx.Node, Any] = {}
    for node in spec.nodes:
        values[node] = next(fakes) if node.op == "placeholder" else run_node(node, values)
        if node.op == "call_function" and not is_view(node):
            inputs = [t for n in node.all_input_nodes for t in tensors_in(values[n])]
            made = sum(map(num_bytes, tensors_in(values[node])))
            found.append((1, sum(map(num_bytes, inputs)), made, False))
    return found


class _NoTensor:
    """A class of which nothing is an instance."""


def _fake_constants(weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {i: weight.detach() for i, weight in weights.items()}

"""Has graphs without gradients frozen while they are counted, though their weights are fake."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from amp_fx.weights.recipes import steps

from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import plain_inputs
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from amp_fx.weights.freeze import FrozenGraph
    from torch import fx

    from tests.traffic.counting import Counter

    Made = tuple[int, int, int, bool]


@contextlib.contextmanager
def freezing(counter: Counter) -> Iterator[list[list[Made]]]:
    """Where fake weights are frozen as real ones would be, by the same passes and checks.

    On CPUs that is without oneDNN's packed weights, whose ops take no fake tensors.

    Args:
        counter: Counts the frozen graphs.

    Yields:
        For each frozen graph what makes its values after a write, a launch each: as
        ``tests.traffic.totals.totals`` takes it.
    """
    from torch._inductor import config, graph

    from amp_fx.backend import entry as backend
    from amp_fx.backend import freezing

    made: list[list[Made]] = []
    runs: list[Any] = []
    weights_to_freeze = freezing.weights_to_freeze

    def compile_counted(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        runs.append(counter.compile(gm, inputs, **kwargs))
        return runs[-1].compiled

    def fake_weights(*args: Any) -> dict[int, str]:
        return weights_to_freeze(*args, plain=plain_inputs(args[2]))

    def fake_constants(inputs: Sequence[Any], weights: Mapping[int, str]) -> dict[int, Any]:
        return {i: inputs[i].detach() for i in weights}

    def call_fake(frozen: FrozenGraph, names: Mapping[int, str], **_: Any) -> Any:
        run = runs.pop()
        made.append([])

        def call(args: list[Any]) -> Any:
            if not made[-1]:
                made[-1] += _made(frozen.recipes.values(), {i: args[i].detach() for i in names})
            return run([args[i] for i in frozen.taken])

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    with (
        config.patch({"cpp.weight_prepack": False}),
        replaced(
            (backend, "weights_to_freeze", fake_weights),
            (freezing, "constants_for", fake_constants),
            (freezing, "compile_graph", compile_counted),
            (freezing, "new_call", call_fake),
            # Fake tensors have no addresses, by which inductor would tell that two are one.
            (graph, "is_same_tensor", lambda left, right: left is right),
        ),
    ):
        yield made


def _made(recipes: Any, weights: Mapping[int, torch.Tensor]) -> list[Made]:
    """What each op of some recipes reads and writes; views do neither."""
    found = []
    for recipe in recipes:
        for inputs, output in steps(recipe, weights):
            storages = {tensor.untyped_storage()._cdata for tensor in inputs}
            if output.untyped_storage()._cdata not in storages:
                found.append((1, sum(map(num_bytes, inputs)), num_bytes(output), False))
    return found

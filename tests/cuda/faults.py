"""Faults that are planted into amp_fx, one at a time, to see that the comparisons find them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs import casts
from amp_fx.passes import fold_casts, insert_casts, restore_outputs
from amp_fx.passes.base import PassResult
from amp_fx.policies.policy import preset
from amp_fx.regions import state
from amp_fx.weights import call, prepare, store

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from torch import fx

    Plant = Callable[[pytest.MonkeyPatch], "dict[str, Any] | None"]

LOW = (torch.bfloat16, torch.float16)


def other(dtype: torch.dtype) -> torch.dtype:
    """Returns the other low dtype."""
    return LOW[1 - LOW.index(dtype)]


# ------------------------------------------------------------------------------- casts in the graph


def _edit_casts(
    edit: Callable[[fx.Graph, fx.Node], None], *, is_low: bool, last: bool = False
) -> Plant:
    """Edits the casts to low dtypes, or to float32, right after they were inserted."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = insert_casts.InsertCasts.call

        def call(self: Any, gm: fx.GraphModule) -> PassResult:
            result = original(self, gm)
            found = [n for n in gm.graph.nodes if casts.inserted_cast(n) is not None]
            chosen = [n for n in found if (n.kwargs["dtype"] in LOW) is is_low]
            for node in chosen[-1:] if last else chosen:
                edit(gm.graph, node)
            return result

        patch.setattr(insert_casts.InsertCasts, "call", call)

    return plant


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def _to_other_low(_: fx.Graph, node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "dtype": other(node.kwargs["dtype"])}  # type: ignore[arg-type]


def _to_float64(_: fx.Graph, node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "dtype": torch.float64}


def _round_first(dtype: torch.dtype) -> Callable[[fx.Graph, fx.Node], None]:
    def edit(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_before(node):
            rounded = graph.call_method("to", (node.all_input_nodes[0], dtype))
        node.replace_input_with(node.all_input_nodes[0], rounded)

    return edit


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        detached = graph.call_method("detach", (node.all_input_nodes[0],))
    node.replace_input_with(node.all_input_nodes[0], detached)


# ------------------------------------------------------------------------------------- other passes


def _no_restoring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore_outputs.RestoreOutputs, "call", lambda *_: PassResult(Counter()))


def _share_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fold_casts, "_may_share", lambda *_: True)


def _fold_lossy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fold_casts, "is_widening", lambda *_: True)
    patch.setattr(fold_casts, "has_gradient", lambda *_: False)


def _ignore_version(patch: pytest.MonkeyPatch) -> None:
    original = casts.inserted_cast

    def without_version(node: fx.Node) -> Any:
        cast = original(node)
        return cast and dataclasses.replace(cast, source_version=(0, 0))

    patch.setattr(fold_casts, "inserted_cast", without_version)
    patch.setattr(fold_casts, "has_gradient", lambda *_: False)


def _ignore_disabling(patch: pytest.MonkeyPatch) -> None:
    original = state.AutocastState.turned

    def turned(self: Any, device: str, **changes: Any) -> Any:
        return original(self, device, **{**changes, "enabled": True})

    patch.setattr(state.AutocastState, "turned", turned)


def _ignore_dtype(patch: pytest.MonkeyPatch) -> None:
    original = state.AutocastState.turned

    def turned(self: Any, device: str, **changes: Any) -> Any:
        return original(self, device, **{**changes, "dtype": torch.bfloat16})

    patch.setattr(state.AutocastState, "turned", turned)


# ----------------------------------------------------------------------------------------- policies


def _policy(ops: dict[str, str]) -> Plant:
    return lambda _: {"policy": preset("torch").with_ops(ops)}


# ----------------------------------------------------------------------------------- cached values


def _never_refresh(patch: pytest.MonkeyPatch) -> None:
    original = store.Store.refresh

    def refresh(self: Any, entries: Any, *args: Any) -> None:
        if any(entry.value is None for entry in entries):
            original(self, entries, *args)

    patch.setattr(store.Store, "refresh", refresh)
    _never_stale(patch)


def _never_stale(patch: pytest.MonkeyPatch) -> None:
    """Passes the cached values of the first call to all later calls."""
    original = call.CachedCall.prepare
    made: dict[int, Any] = {}

    def enter(self: Any, args: Any) -> Any:
        if id(self) not in made:
            return None
        self._cache.begin()
        run, values = made[id(self)]
        return run, [*[args[i] for i in self.passed], *values]

    def prepare(self: Any, args: Any) -> Any:
        run, inputs = original(self, args)
        made[id(self)] = run, inputs[len(self.passed) :]
        return run, inputs

    patch.setattr(call.CachedCall, "enter", enter)
    patch.setattr(call.CachedCall, "prepare", prepare)


def _made(change: Callable[[list[Any], list[Any]], None]) -> Plant:
    """Changes casts right after they were computed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = store.Store._recompute

        def made(self: Any, entries: Any, sources: Any, olds: Any) -> list[Any]:
            values = original(self, entries, sources, olds)
            pairs = zip(values, sources, strict=True)
            casts_made = [(value, weights[0]) for value, weights in pairs if value.dtype in LOW]
            if casts_made:
                change([value for value, _ in casts_made], [weight for _, weight in casts_made])
            return values

        patch.setattr(store.Store, "_recompute", made)

    return plant


def _truncate(values: list[Any], weights: list[Any]) -> None:
    for value, weight in zip(values, weights, strict=True):
        if value.dtype == torch.bfloat16:
            bits = weight.detach().view(torch.int32) >> 16
            value.view(torch.int16).copy_(bits.to(torch.int16))
        else:
            value.copy_(weight.detach().to(torch.bfloat16))


def _swap(values: list[Any], _: Any) -> None:
    alike = [v for v in values if v.shape == values[0].shape]
    first = alike[0].clone()
    alike[0].copy_(alike[-1])
    alike[-1].copy_(first)


def _leave_last(values: list[Any], _: Any) -> None:
    values[-1].zero_()


def _transpose(values: list[Any], _: Any) -> None:
    for value in values:
        if value.dim() == 2 and value.shape[0] == value.shape[1]:
            value.copy_(value.t().clone())


def _key_without_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prepare.CachedValueSpec, "key", lambda self, _: (self.is_alias, self.ops))


def _merge_all(patch: pytest.MonkeyPatch) -> None:
    """Merges all nodes of one op, even if their inputs differ."""
    patch.setattr(prepare, "_text", lambda node, _: str(node.target))


def _only_first_refresh(patch: pytest.MonkeyPatch) -> None:
    """Recomputes only the first of several stale values."""
    original = store.Store._recompute

    def made(self: Any, entries: Any, sources: Any, olds: Any) -> list[Any]:
        before = [None if old is None else old.clone() for old in olds]
        values = original(self, entries, sources, olds)
        for value, old in list(zip(values, before, strict=True))[1:]:
            if old is not None:
                value.copy_(old)
        return values

    patch.setattr(store.Store, "_recompute", made)


FAULTS: dict[str, Plant] = {
    "low casts dropped": _edit_casts(_drop, is_low=True),
    "float32 casts dropped": _edit_casts(_drop, is_low=False),
    "one float32 cast dropped": _edit_casts(_drop, is_low=False, last=True),
    "other low dtype": _edit_casts(_to_other_low, is_low=True),
    "float64 for float32": _edit_casts(_to_float64, is_low=False),
    "rounded twice": _edit_casts(_round_first(torch.float16), is_low=True),
    "rounded before float32": _edit_casts(_round_first(torch.bfloat16), is_low=True, last=True),
    "gradient cut": _edit_casts(_detach, is_low=False, last=True),
    "gradients cut": _edit_casts(_detach, is_low=True),
    "outputs not restored": _no_restoring,
    "all casts shared": _share_all,
    "lossy round trip folded": _fold_lossy,
    "versions ignored": _ignore_version,
    "disabled region ignored": _ignore_disabling,
    "dtype of a region ignored": _ignore_dtype,
    "product in float32": _policy({"mm": "fp32", "linear": "fp32"}),
    "softmax low": _policy({"softmax": "lower_precision_fp"}),
    "sum low": _policy({"sum": "lower_precision_fp"}),
    "norm low": _policy({"layer_norm": "lower_precision_fp"}),
    "cat low": _policy({"cat": "lower_precision_fp"}),
    "pow low": _policy({"pow": "lower_precision_fp"}),
    "never refreshed": _never_refresh,
    "never stale": _never_stale,
    "truncated copies": _made(_truncate),
    "copies swapped": _made(_swap),
    "last copy is zeros": _made(_leave_last),
    "square copies transposed": _made(_transpose),
    "only the first of several refreshed": _only_first_refresh,
    "one copy for two dtypes": _key_without_dtype,
    "one node for two weights": _merge_all,
}
"""Changes to amp_fx that make results wrong; some give options for the backend."""

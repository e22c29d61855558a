"""Captures a model by ``torch.export``, and rewrites the graph by the passes of the backend."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.pipeline import run_passes, with_added
from amp_fx.errors import UnsupportedError
from amp_fx.exporting.program import (
    WRITES,
    clean,
    copied_graph,
    groups_by_storage,
    note_rewrite,
    outputs_of,
    tensors_by_input,
    with_graph,
    written_inputs,
)
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.decompose import Site
from amp_fx.graphs.metadata import DECISIONS
from amp_fx.graphs.values import is_written, recorded_value, value_of
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.refuse_islands import RefuseIslands, place_of
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.passes.store_weights_low import StoreWeightsLow
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import is_functorch_wrapped_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn
    from torch.export import ExportedProgram

    from amp_fx.passes.base import Observer, Pass
    from amp_fx.policies.policy import Policy


def refuse_transforms(program: ExportedProgram) -> None:
    """Refuses what ``torch.vmap``, ``torch.func.grad`` and the like left in a program."""
    for graph in graphs_in(program.graph_module):
        if node := next(filter(_is_transform, graph.nodes), None):
            raise UnsupportedError(
                f"{node.format_node()} is part of a torch.func transform{place_of(node)}. "
                f"{_advice(program)}"
            )


def _is_transform(node: fx.Node) -> bool:
    """Returns True if ``torch.export`` recorded a node of a transform, by its function's module."""
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return module.startswith("torch._functorch") and name != "lazy_load_decompositions"


def _advice(program: ExportedProgram) -> str:
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    if any(map(is_functorch_wrapped_tensor, constants)):
        return "torch.export itself bakes such tensors in as constants: it cannot export it"
    return (
        "Have torch.export resolve it, and give what comes out: "
        "amp_fx.export(torch.export.export(model, args).run_decompositions({}))"
    )


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    state: AutocastState | None,
    *,
    dynamic_shapes: Any,
    strict: bool,
) -> ExportedProgram:
    """Exports a model with ``torch.export``, outside of the calling thread's region.

    Python code of the model that reads dtypes or ``torch.is_autocast_enabled()`` sees the region
    ``state``, which the program then has around all of it.
    """
    without = AutocastState.ambient().turned_off()
    with without.applied(), torch.no_grad(), _without_fast_path(), _called_in(model, state):
        return torch.export.export(
            model,
            args,
            None if kwargs is None else dict(kwargs),
            dynamic_shapes=dynamic_shapes,
            strict=strict,
        )


def devices_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> set[torch.device]:
    """The devices of a model's parameters and buffers, and of its arguments."""
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    return {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keeps ``nn.TransformerEncoder`` from one op whose kernel alone knows of autocast.

    ``torch.export`` does so by itself where it is not strict.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _called_in(model: nn.Module, state: AutocastState | None) -> Iterator[None]:
    """Runs every call of a model in a region, hooks included, while the context is open.

    The model gets a class of its own for that time: ``torch.export`` takes paths of modules from
    the module that it is given, which a module around it would change.
    """
    if state is None:
        yield
        return
    kind = type(model)

    def call_itself(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs)  # which torch.export replaces meanwhile

    call: Callable[..., Any] = call_itself
    for device_type in reversed(state.enabled):
        call = _inside(call, device_type, state.low_dtype(device_type), state.cache_enabled)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})
    try:
        yield
    finally:
        model.__class__ = kind


def _inside(
    call: Callable[..., Any], device_type: str, dtype: torch.dtype, cache_enabled: bool
) -> Callable[..., Any]:
    def call_inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype, cache_enabled=cache_enabled):
            return call(self, *args, **kwargs)

    return call_inside


Dtypes = tuple["torch.dtype | None", ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """The region that a program is rewritten for."""

    state: AutocastState
    policy: Policy
    is_bare: bool

    def turned_off(self) -> Region:
        """Returns the state with no device on, where only the program's own regions are."""
        return dataclasses.replace(self, state=self.state.turned_off(), is_bare=False)


def rewrite_program(
    program: ExportedProgram,
    region: Region,
    output_dtypes: Dtypes,
    *,
    stores_low: bool,
    observer: Observer | None = None,
) -> ExportedProgram:
    """A program with its casts as ops of it.

    Args:
        program: What was exported; it stays as it is.
        region: The region around it.
        output_dtypes: For each output the dtype that it is brought to; None leaves it.
        stores_low: Whether weights that are only read low are stored low.
        observer: Told of each pass.

    Raises:
        UnsupportedError: Part of it cannot be rewritten.
        PassError: A pass failed.
    """
    gm = graph_to_rewrite(program)
    tensors = tensors_by_input(program)
    written = written_inputs(program.graph_signature)
    groups = tuple(
        group for group in groups_by_storage(tensors) if stores_low and written.isdisjoint(group)
    )
    passes = (
        *_passes_to_casts(region),
        RestoreOutputs(output_dtypes),
        HoistCasts(tuple(name for name in tensors if name not in written)),
        FoldCasts(),
        StoreWeightsLow(groups),
        RefuseIslands(),
    )
    with no_autocast():
        reports = run_passes(gm, with_added(passes, (), ()), observer=observer)
    _refuse_float8(gm)
    if observer is not None:
        observer.rewritten(reports)
    written |= {node.name for node in gm.graph.find_nodes(op="placeholder") if is_written(node)}
    note_rewrite(gm, region.policy, region.state)
    clean(gm)
    return with_graph(program, gm, written)


def _refuse_float8(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if any(d.policy is CastPolicy.FLOAT8 for d in DECISIONS.get(node) or ()):
            raise UnsupportedError(
                f"{node.name} is to run in float8, which exported programs cannot hold: a program "
                "would quantize its weights in every call; export with another policy"
            )


def plain_output_dtypes(program: ExportedProgram, region: Region) -> Dtypes:
    """The dtypes of a program's outputs where no region is around it."""
    gm = graph_to_rewrite(program)
    with no_autocast():
        run_passes(gm, _passes_to_casts(region.turned_off()))
    return _dtypes(value_of(o) if isinstance(o, fx.Node) else o for o in outputs_of(gm.graph))


def written_dtypes(program: ExportedProgram) -> Dtypes:
    """Returns the dtypes of inputs that outputs are written back into; None for other outputs."""
    placeholders = program.graph.find_nodes(op="placeholder")
    by_target = {
        spec.target or spec.arg.name: recorded_value(node)
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
    }
    return _dtypes(
        by_target.get(spec.target) if spec.kind in WRITES else None
        for spec in program.graph_signature.output_specs
    )


def graph_to_rewrite(program: ExportedProgram) -> fx.GraphModule:
    """A copy of a program's graph without what it asserts of dtypes that may change.

    ``torch.export`` puts ``_assert_tensor_metadata`` before each ``to``: what was captured.
    """
    refuse_transforms(program)
    gm = copied_graph(program)
    inputs = set(program.graph_signature.user_inputs)
    assertion = torch.ops.aten._assert_tensor_metadata.default
    for graph in graphs_in(gm):
        for node in graph.find_nodes(op="call_function", target=assertion):
            if graph is not gm.graph or node.args[0].name not in inputs:
                graph.erase_node(node)
    return gm


def _passes_to_casts(region: Region) -> tuple[Pass, ...]:
    site = Site(region.state, is_grad_enabled=False, is_bare=region.is_bare)
    return InlineRegions(), MarkRegions(site), InsertCasts(region.policy)


def _dtypes(values: Iterable[Any]) -> Dtypes:
    return tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in values)

"""Captures models with ``torch.export``, and rewrites the graphs with the backend's passes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.added_passes import with_added
from amp_fx.backend.pipeline import run_passes
from amp_fx.errors import UnsupportedError
from amp_fx.exporting.folding import with_folded_batch_norms
from amp_fx.exporting.other_device import captured_on, move
from amp_fx.exporting.program import (
    REGION,
    WRITES,
    clean,
    copied_graph,
    groups_by_storage,
    outputs_of,
    tensors_by_input,
    with_graph,
    written_inputs,
)
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.metadata import DECISIONS, VALUE
from amp_fx.graphs.records import AutocastSite
from amp_fx.graphs.values import is_written, recorded_value
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.inline_regions import InlineRegions
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.reject_opaque_nodes import RejectOpaqueNodes, describe_location
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.passes.store_weights_low import StoreWeightsLow
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.recurrent import WHOLE_NETWORKS
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import is_functorch_wrapped_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn
    from torch.export import ExportedProgram

    from amp_fx.passes.base import Pass
    from amp_fx.policies.policy import Policy

aten = torch.ops.aten


def refuse_transforms(program: ExportedProgram) -> None:
    """Raises an error if a program contains nodes of ``torch.vmap`` or other transforms."""
    for graph in graphs_in(program.graph_module):
        if node := next(filter(_is_transform, graph.nodes), None):
            raise UnsupportedError(
                f"{node.format_node()} is part of a torch.func transform{describe_location(node)}. "
                f"{_advice(program)}"
            )


def _is_transform(node: fx.Node) -> bool:
    """Returns True if a node calls a function of ``torch._functorch``."""
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return module.startswith("torch._functorch") and name != "lazy_load_decompositions"


def _advice(program: ExportedProgram) -> str:
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    if any(map(is_functorch_wrapped_tensor, constants)):
        return "torch.export stored wrapped tensors as constants, so it cannot export the program"
    return (
        "Decompose the transform first: "
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
    device: torch.device | None = None,
) -> ExportedProgram:
    """Exports a model with ``torch.export``, outside of the calling thread's region.

    Args:
        model: The module.
        args: Example inputs.
        kwargs: Example keyword inputs.
        state: The region around the whole model, which Python code of the model observes; None for
            no region.
        dynamic_shapes: As for ``torch.export.export``.
        strict: As for ``torch.export.export``.
        device: The device of tensors in the program; None for that of the model.
    """
    disabled = AutocastState.ambient().turned_off()
    with (
        disabled.applied(),
        torch.no_grad(),
        _without_fast_path(),
        _called_in(model, state),
        captured_on(device),
    ):
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
    """Returns the devices of a model's parameters and buffers, and of its arguments."""
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    return {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Context that disables the fast path of ``nn.TransformerEncoder``.

    The fast path is one op whose kernel handles autocast internally. Non-strict ``torch.export``
    disables it as well.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _called_in(model: nn.Module, state: AutocastState | None) -> Iterator[None]:
    """Context in which every call of a model, including hooks, runs in a region.

    Replaces the class of the model. A wrapper module would change the paths of modules in the
    program.
    """
    if state is None:
        yield
        return
    kind = type(model)

    def call_itself(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs)  # looked up late: torch.export replaces it

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
class ExportRegion:
    """The region around an exported program.

    Attributes:
        state: The autocast state.
        policy: The policy.
        is_bare: Whether the program was captured outside of the region.
        device: The device that the program is for, if its tensors are elsewhere.
    """

    state: AutocastState
    policy: Policy
    is_bare: bool
    device: torch.device | None = None

    def turned_off(self) -> ExportRegion:
        """Returns the region with autocast disabled, so that only inner regions apply."""
        return dataclasses.replace(self, state=self.state.turned_off(), is_bare=False)


def rewrite_program(
    program: ExportedProgram,
    region: ExportRegion,
    output_dtypes: Dtypes,
    *,
    stores_low: bool,
    folds_batch_norm: bool = False,
) -> ExportedProgram:
    """Returns a program with casts as ops.

    Args:
        program: An exported program, which is not changed.
        region: The region around the program.
        output_dtypes: For each output, the dtype to cast it to, or None.
        stores_low: Whether weights that are only read in a low dtype are stored in it.
        folds_batch_norm: Whether batch norms are folded into convolutions.

    Raises:
        UnsupportedError: Part of the program cannot be rewritten.
        PassError: A pass failed.
    """
    if folds_batch_norm:
        program = with_folded_batch_norms(program, graph_to_rewrite(program, _device_of(program)))
    gm = graph_to_rewrite(program, region.device)
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
        RejectOpaqueNodes(),
    )
    with no_autocast():
        run_passes(gm, with_added(passes, (), ()))
    _reject_float8(gm)
    written |= {node.name for node in gm.graph.find_nodes(op="placeholder") if is_written(node)}
    gm.meta[REGION] = region
    clean(gm)
    if region.device is not None:
        move(gm, _device_of(program))
    return with_graph(program, gm, written)


def _reject_float8(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if any(d.policy is CastPolicy.FLOAT8 for d in DECISIONS.get(node) or ()):
            raise UnsupportedError(
                f"{node.name} would run in float8, which is not supported in exported programs, "
                "because they would quantize weights in every call: export with another policy"
            )


def plain_output_dtypes(program: ExportedProgram, region: ExportRegion) -> Dtypes:
    """Returns the dtypes of a program's outputs without a region around the program."""
    gm = graph_to_rewrite(program, region.device)
    with no_autocast():
        run_passes(gm, _passes_to_casts(region.turned_off()))
    return _dtypes(VALUE.get(o) if isinstance(o, fx.Node) else o for o in outputs_of(gm.graph))


def written_dtypes(program: ExportedProgram) -> Dtypes:
    """Returns the dtypes of inputs to which outputs are written back; None for other outputs."""
    placeholders = program.graph.find_nodes(op="placeholder")
    by_target = {
        spec.target or spec.arg.name: recorded_value(node)
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
    }
    return _dtypes(
        by_target.get(spec.target) if spec.kind in WRITES else None
        for spec in program.graph_signature.output_specs
    )


def _device_of(program: ExportedProgram) -> torch.device:
    """Returns the device of a program's weights and example inputs, which must be one."""
    leaves = pytree.tree_leaves((tensors_by_input(program), program.example_inputs))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def graph_to_rewrite(
    program: ExportedProgram, device: torch.device | None = None
) -> fx.GraphModule:
    """Copies a program's graph without assertions on dtypes that may change.

    ``torch.export`` inserts ``_assert_tensor_metadata``, with captured dtypes, before each ``to``.

    Args:
        program: The program.
        device: The device of the copy's tensors; None for that of the program.
    """
    refuse_transforms(program)
    gm = copied_graph(program)
    if device is not None:
        move(gm, device)
    inputs = set(program.graph_signature.user_inputs)
    assertion = aten._assert_tensor_metadata.default
    for graph in graphs_in(gm):
        for node in graph.find_nodes(op="call_function", target=assertion):
            if graph is not gm.graph or node.args[0].name not in inputs:
                graph.erase_node(node)
    return gm


def with_whole_networks(policy: Policy) -> Policy:
    """Returns a policy that casts recurrent networks as a whole."""
    tables = dict(policy.tables)
    for device_type, networks in WHOLE_NETWORKS.items():
        table = tables.get(device_type, {})
        added = {op: table[part] for op, part in networks.items() if part in table}
        tables[device_type] = {**added, **table}
    return dataclasses.replace(policy, tables=tables)


def _passes_to_casts(region: ExportRegion) -> tuple[Pass, ...]:
    site = AutocastSite(region.state, is_grad_enabled=False, is_bare=region.is_bare)
    return InlineRegions(), MarkRegions(site), InsertCasts(region.policy)


def _dtypes(values: Iterable[Any]) -> Dtypes:
    return tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in values)

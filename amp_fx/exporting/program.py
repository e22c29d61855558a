"""Exported programs: their weights, copies of their graphs, and new programs out of old ones.

Notes in a program hold the reason for each op's dtype, saved with the program.

``torch.export.save`` writes of the metadata of nodes and graphs what it knows, and the key
``custom``, as JSON.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.bodies import copy_graph_module, graphs_in
from amp_fx.graphs.casts import Cast, inserted_cast
from amp_fx.graphs.decompose import OpDecision, Site
from amp_fx.graphs.metadata import (
    CAPTURED,
    CAST,
    DECISIONS,
    EXAMPLE_VALUE,
    HAS_REWRITTEN_BODIES,
    ISLAND,
    RANGE_NOTE,
    SITE,
    STORED_LOW,
    VERSION,
)
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import storage_id, value_of
from amp_fx.regions.state import AutocastState
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.export.graph_signature import ExportGraphSignature

    from amp_fx.policies.policy import Policy

CUSTOM = "custom"
KEY = "amp_fx"

_OURS = (
    *(CAPTURED, CAST, DECISIONS, EXAMPLE_VALUE, HAS_REWRITTEN_BODIES, ISLAND, RANGE_NOTE),
    *(SITE, STORED_LOW, VERSION),
)


def note_rewrite(gm: fx.GraphModule, policy: Policy, state: AutocastState) -> None:
    """Writes down what was done to a graph, for ``restored_notes``."""
    stored = {n.name: STORED_LOW.of(n) for n in gm.graph.nodes if STORED_LOW.is_on(n)}
    about = {"policy": policy.name, "region": _region(state), "stored_low": stored}
    gm.meta[CUSTOM] = {**(gm.meta.get(CUSTOM) or {}), KEY: about}
    for node in _nodes(gm):
        found = _note(node, state)
        if found:
            node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), KEY: found}


def clean(gm: fx.GraphModule) -> None:
    """Takes off what passes wrote onto nodes, and what is no longer true of them."""
    for node in _nodes(gm):
        for key in (*(key.name for key in _OURS), "tensor_meta"):  # the last is torch's own
            node.meta.pop(key, None)


def notes_of(program: ExportedProgram) -> dict[str, Any] | None:
    """Returns the notes of ``note_rewrite``; None if amp_fx has not rewritten the program."""
    found: dict[str, Any] | None = (program.graph_module.meta.get(CUSTOM) or {}).get(KEY)
    return found


def restore_notes(gm: fx.GraphModule) -> AutocastState:
    """Puts back what passes wrote onto nodes, as far as it was written down.

    Returns:
        The region around it.
    """
    about = gm.meta[CUSTOM][KEY]
    for node in _nodes(gm):
        found = (node.meta.get(CUSTOM) or {}).get(KEY) or {}
        state = _state(found.get("region", about["region"]))
        SITE.put(node, Site(state, is_grad_enabled=False))
        if "cast" in found:
            old, new, reason = found["cast"]
            CAST.put(node, Cast(getattr(torch, old), getattr(torch, new), None, reason))
        if "decisions" in found:
            decisions = (OpDecision(o, d, CastPolicy(p), w) for o, d, p, w in found["decisions"])
            DECISIONS.put(node, tuple(decisions))
        if "range_guard" in found:
            RANGE_NOTE.put(node, found["range_guard"])
    return _state(about["region"])


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for graph in graphs_in(gm) for node in graph.nodes]


def _note(node: fx.Node, start: AutocastState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cast = inserted_cast(node)
    if cast is not None:
        found["cast"] = [dtype_name(cast.source_dtype), dtype_name(cast.dtype), cast.reason]
    decisions = DECISIONS.get(node) or ()
    if decisions:
        found["decisions"] = [[d.op, d.device_type, d.policy.value, d.origin] for d in decisions]
    if RANGE_NOTE.is_on(node):
        found["range_guard"] = RANGE_NOTE.of(node)
    site = SITE.get(node)
    if site is not None and site.state != start:
        found["region"] = _region(site.state)
    return found


def _region(state: AutocastState) -> dict[str, str]:
    return {device: dtype_name(state.low_dtype(device)) for device in state.enabled}


def _state(region: dict[str, str]) -> AutocastState:
    state = AutocastState.ambient().turned_off()
    for device, name in region.items():
        state = state.turned(device, enabled=True, dtype=getattr(torch, name))
    return state


WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The inputs of a graph that the program brings along."""

WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
"""The outputs of a graph that are written back into its inputs."""


def copied_graph(program: ExportedProgram) -> fx.GraphModule:
    """A copy of a program's graph; the signature refers to its nodes by name."""
    gm = copy_graph_module(program.graph_module)
    for old, new in zip(program.graph.nodes, gm.graph.nodes, strict=True):
        new.name = old.name
    gm.recompile()
    return gm


def tensors_by_input(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The weights of a program by the names of their placeholders."""
    found: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in WEIGHTS:
            assert spec.target is not None
            tensor = program.state_dict.get(spec.target)
            if tensor is None:
                tensor = program.constants[spec.target]
            found[spec.arg.name] = tensor
    return found


def weight_bytes(program: ExportedProgram) -> int:
    """The memory of a program's weights, in bytes; that of tied ones once."""
    held = (*program.state_dict.values(), *program.constants.values())
    sizes = {_identity(t): num_bytes(t) for t in held if isinstance(t, torch.Tensor)}
    return sum(sizes.values())


def groups_by_storage(tensors: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Names of tensors, those that share a storage together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(storage_id(tensor), []).append(name)
    return tuple(map(tuple, groups.values()))


def written_inputs(signature: ExportGraphSignature) -> set[str]:
    """Names of the placeholders that a functional program writes through its outputs."""
    written = {spec.target for spec in signature.output_specs if spec.kind in WRITES}
    return {
        spec.arg.name
        for spec in signature.input_specs
        if spec.target in written or spec.arg.name in written
    }


def with_graph(
    program: ExportedProgram, gm: fx.GraphModule, written: Collection[str]
) -> ExportedProgram:
    """A program with another graph, and its weights in the dtypes that this one takes.

    Weights that stay as they are share their memory with those of the first program, but for
    those that the graph writes to.
    """
    placeholders = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    own: dict[Any, torch.Tensor] = {}  # one that has several names is made once
    state_dict, constants = dict(program.state_dict), dict(program.constants)
    for spec in program.graph_signature.input_specs:
        if spec.kind not in WEIGHTS:
            continue
        dtype = value_of(placeholders[spec.arg.name]).dtype
        for holder in (state_dict, constants):
            if spec.target in holder:
                tensor = holder[spec.target]
                key = _identity(tensor)
                if key not in own and (tensor.dtype != dtype or spec.arg.name in written):
                    own[key] = _own(tensor, dtype)
    for holder in (state_dict, constants):
        for name, tensor in holder.items():
            if isinstance(tensor, torch.Tensor):
                holder[name] = own.get(_identity(tensor), tensor)
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=_renamed_outputs(program.graph_signature, gm.graph),
        state_dict=state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in a dtype; a parameter, if it is one of a parameter."""
    with torch.no_grad():
        new = tensor.detach().to(dtype, copy=True)
    needs_grad = tensor.requires_grad and tensor.dtype == dtype
    return nn.Parameter(new, needs_grad) if isinstance(tensor, nn.Parameter) else new


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one in memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
    return storage_id(tensor), tensor.dtype, *place


def _renamed_outputs(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """A signature whose outputs have the names that their nodes now have."""
    renamed = copy.deepcopy(signature)
    for spec, output in zip(renamed.output_specs, outputs_of(graph), strict=True):
        if isinstance(output, torch.fx.Node):
            spec.arg.name = output.name
    return renamed


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Returns a graph's outputs, in the order of the signature's ``output_specs``."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

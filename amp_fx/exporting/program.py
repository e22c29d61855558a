"""Weights and graphs of exported programs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument

from amp_fx.errors import ArgumentTypeError
from amp_fx.graphs.bodies import copy_graph_module, graphs_in
from amp_fx.graphs.metadata import (
    CAPTURED,
    EXAMPLE_VALUE,
    HAS_REWRITTEN_BODIES,
    OPAQUE,
    VALUE,
    VERSION,
)
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import set_value, storage_id

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.export.graph_signature import ExportGraphSignature


REGION = "amp_fx_region"
"""Key of the metadata of a rewritten graph with the ``ExportRegion`` around the program."""

_TRANSIENT = (CAPTURED, EXAMPLE_VALUE, HAS_REWRITTEN_BODIES, OPAQUE, VERSION)
"""Metadata that only passes read. ``amp_fx.explain`` reads the rest; files contain none of it."""


def clean(gm: fx.GraphModule) -> None:
    """Removes the metadata that only passes read, and outdated metadata of torch."""
    for graph in graphs_in(gm):
        for node in graph.nodes:
            for key in _TRANSIENT:
                node.meta.pop(key.name, None)
            node.meta.pop("tensor_meta", None)


def check_program(function: str, program: object) -> None:
    """Raises an error if an argument of a function is not an exported program."""
    if not isinstance(program, ExportedProgram):
        raise ArgumentTypeError(
            f"amp_fx.{function} expects an exported program, got {type(program).__name__}: "
            "create one with amp_fx.export(model, args)"
        )


WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""Kinds of inputs whose tensors are part of the program."""

WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
"""Kinds of outputs that are written back to inputs."""


def copied_graph(program: ExportedProgram) -> fx.GraphModule:
    """Copies a program's graph with its node names, to which the signature refers."""
    gm = copy_graph_module(program.graph_module)
    for old, new in zip(program.graph.nodes, gm.graph.nodes, strict=True):
        new.name = old.name
    gm.recompile()
    return gm


def tensors_by_input(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the weights of a program by the names of their placeholders."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in WEIGHTS:
            assert spec.target is not None
            tensor = program.state_dict.get(spec.target)
            if tensor is None:
                tensor = program.constants[spec.target]
            tensors[spec.arg.name] = tensor
    return tensors


def weight_bytes(program: ExportedProgram) -> int:
    """Returns the memory of a program's weights in bytes; tied weights count once."""
    values = (*program.state_dict.values(), *program.constants.values())
    sizes = {_identity(t): num_bytes(t) for t in values if isinstance(t, torch.Tensor)}
    return sum(sizes.values())


def groups_by_storage(tensors: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Returns the names of tensors, grouped by storage."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(storage_id(tensor), []).append(name)
    return tuple(map(tuple, groups.values()))


def written_inputs(signature: ExportGraphSignature) -> set[str]:
    """Returns the names of the placeholders that a functional program writes through outputs."""
    written = {spec.target for spec in signature.output_specs if spec.kind in WRITES}
    return {
        spec.arg.name
        for spec in signature.input_specs
        if spec.target in written or spec.arg.name in written
    }


def with_graph(
    program: ExportedProgram,
    gm: fx.GraphModule,
    written: Collection[str],
    added: Mapping[str, torch.Tensor] | None = None,
) -> ExportedProgram:
    """Returns a program with another graph, and weights in the dtypes of its placeholders.

    Weights whose dtype does not change share memory with the original program, unless the graph
    writes them. Weights without a placeholder are dropped.

    Args:
        program: The original program.
        gm: The graph.
        written: Names of the placeholders that the graph writes.
        added: New weights, by the names of their placeholders, which are the first.
    """
    placeholders = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    copies: dict[Any, torch.Tensor] = {}  # tensors with several names are copied once
    state_dict, constants = dict(program.state_dict), dict(program.constants)
    signature = _renamed_outputs(program.graph_signature, gm.graph)
    for name, tensor in (added or {}).items():
        state_dict[name] = tensor
        spec = InputSpec(InputKind.BUFFER, TensorArgument(name), name, persistent=True)
        signature.input_specs.insert(0, spec)
    for spec in [s for s in signature.input_specs if s.arg.name not in placeholders]:
        signature.input_specs.remove(spec)
        state_dict.pop(str(spec.target), None)
        constants.pop(str(spec.target), None)
    for spec in signature.input_specs:
        if spec.kind not in WEIGHTS:
            continue
        dtype = VALUE.of(placeholders[spec.arg.name]).dtype
        for values in (state_dict, constants):
            if spec.target in values:
                tensor = values[spec.target]
                key = _identity(tensor)
                if key not in copies and (tensor.dtype != dtype or spec.arg.name in written):
                    copies[key] = _copy(tensor, dtype)
    for values in (state_dict, constants):
        for name, tensor in values.items():
            if isinstance(tensor, torch.Tensor):
                values[name] = copies.get(_identity(tensor), tensor)
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=signature,
        state_dict=state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def without_gradients(program: ExportedProgram) -> ExportedProgram:
    """Clears ``requires_grad`` of the weights of a new program, which it shares with another one.

    Kernels of attention return other strides if gradients are needed, and a view of the result in
    the program may be impossible.
    """
    weights: dict[int, torch.Tensor] = {}  # tied weights stay one tensor

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in weights:
            weights[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
        return weights[id(tensor)]

    for values in (program.state_dict, program.constants):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = detached(value)
    for node in program.graph.find_nodes(op="placeholder"):
        if isinstance(VALUE.get(node), torch.Tensor):
            set_value(node, VALUE.of(node).detach())
    return program


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copies a tensor or parameter to a dtype."""
    with torch.no_grad():
        new = tensor.detach().to(dtype, copy=True)
    needs_grad = tensor.requires_grad and tensor.dtype == dtype
    return nn.Parameter(new, needs_grad) if isinstance(tensor, nn.Parameter) else new


def _identity(tensor: torch.Tensor) -> Any:
    """Returns a key that is equal for tensors with the same memory, dtype and layout."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    layout = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
    return storage_id(tensor), tensor.dtype, *layout


def _renamed_outputs(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """Returns a signature whose outputs have the current names of their nodes."""
    renamed = copy.deepcopy(signature)
    for spec, output in zip(renamed.output_specs, outputs_of(graph), strict=True):
        if isinstance(output, torch.fx.Node):
            spec.arg.name = output.name
    return renamed


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Returns a graph's outputs, in the order of the signature's ``output_specs``."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

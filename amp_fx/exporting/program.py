"""Exported programs: their weights, copies of their graphs, and new programs out of old ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from amp_fx.graphs.graph_copy import copy_graph_module
from amp_fx.graphs.values import recorded_value, storage_id, tensors_in, value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import fx
    from torch.export.graph_signature import ExportGraphSignature

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The inputs of a graph that the program brings along."""

WRITES = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
)
"""The outputs of a graph that are written back into its inputs."""


def copied_graph(program: ExportedProgram) -> fx.GraphModule:
    """A copy of a program's graph; the signature refers to its nodes by name."""
    gm = copy_graph_module(program.graph_module)
    for old, new in zip(program.graph.nodes, gm.graph.nodes, strict=True):
        new.name = old.name
    gm.recompile()
    return gm


def devices_in(program: ExportedProgram) -> set[torch.device]:
    """The devices of all tensors of a program."""
    values = [recorded_value(node) for node in program.graph.nodes]
    return {tensor.device for tensor in tensors_in(values)}


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
    tensors = [*program.state_dict.values(), *program.constants.values()]
    sizes = {
        _identity(tensor): tensor.numel() * tensor.itemsize
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
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
    own = _Own()
    state_dict, constants = dict(program.state_dict), dict(program.constants)
    for spec in program.graph_signature.input_specs:
        if spec.kind not in WEIGHTS:
            continue
        dtype = value_of(placeholders[spec.arg.name]).dtype
        for holder in (state_dict, constants):
            if spec.target in holder:
                is_copied = spec.arg.name in written
                holder[spec.target] = own.made(holder[spec.target], dtype, is_copied=is_copied)
    for holder in (state_dict, constants):
        holder.update({name: own.tied_to(tensor) for name, tensor in holder.items()})
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


class _Own:
    """Weights of a program's own, made of other ones: one that has several names once."""

    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}

    def made(self, tensor: torch.Tensor, dtype: torch.dtype, *, is_copied: bool) -> torch.Tensor:
        """A tensor in a dtype; itself if it has that and needs not be a copy."""
        if tensor.dtype == dtype and not is_copied:
            return tensor
        key = _identity(tensor)
        if key not in self._made:
            with torch.no_grad():
                new = tensor.detach().to(dtype, copy=True)
            needs_grad = tensor.requires_grad and tensor.dtype == dtype
            is_parameter = isinstance(tensor, nn.Parameter)
            self._made[key] = nn.Parameter(new, requires_grad=needs_grad) if is_parameter else new
        return self._made[key]

    def tied_to(self, tensor: Any) -> Any:
        """Returns what replaced a tensor under another name; itself if nothing did."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self._made.get(_identity(tensor), tensor)


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one in memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
    return storage_id(tensor), tensor.dtype, *place


def _renamed_outputs(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """A signature whose outputs have the names that their nodes now have."""
    renamed = copy.deepcopy(signature)
    for spec, output in zip(renamed.output_specs, _outputs(graph), strict=True):
        if isinstance(output, torch.fx.Node):
            spec.arg.name = output.name
    return renamed


def _outputs(graph: fx.Graph) -> Iterable[Any]:
    outputs: Any = graph.output_node().args[0]
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Returns a graph's outputs, in the order of the signature's ``output_specs``."""
    return tuple(_outputs(graph))

"""Explains exported programs: what they hold, or what ``amp_fx.export`` would make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.dtypes import dtype_name
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.graphs import cast_record, islands_in
from amp_fx.explanation.reading import GraphReader
from amp_fx.explanation.reasons import clean_reason, region_names
from amp_fx.explanation.records import CastRecord, GraphRecord
from amp_fx.explanation.work import WorkMeter
from amp_fx.exporting.entry import export
from amp_fx.exporting.notes import notes_of, restore_notes
from amp_fx.exporting.program import WEIGHTS, copied_graph
from amp_fx.graphs.metadata import CAST
from amp_fx.graphs.places import module_types
from amp_fx.graphs.traffic import num_bytes
from amp_fx.graphs.values import detect_fake_mode, recorded_value, remember_captured
from amp_fx.regions.module_stack import NO_FRAME

if TYPE_CHECKING:
    import torch
    from torch import fx
    from torch.export import ExportedProgram

    from amp_fx.policies.policy import Policy


def explain_program(
    program: ExportedProgram,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | None = None,
) -> Explanation:
    """What a program of ``amp_fx.export`` holds; of another one, what that would make of it."""
    if notes_of(program) is None:
        program = export(program, dtype=dtype, policy="torch" if policy is None else policy)
    notes = notes_of(program)
    assert notes is not None
    gm = copied_graph(program)
    state = restore_notes(gm)
    _name_weights(gm, program)
    remember_captured(gm.graph)
    reader = GraphReader(gm, state, NO_FRAME, meter=WorkMeter(detect_fake_mode(gm.graph)))
    nodes = reader.read()
    types = module_types(gm, NO_FRAME)
    device, _, low = next(iter(region_names(state)), " ").partition(" ")
    record = GraphRecord(
        index=0,
        stage="forward",
        autocast=region_names(state),
        nodes=nodes,
        casts=(*_casts(gm, reader), *_stored(gm, reader, notes["stored_low"])),
        islands=islands_in(nodes),
        modules=tuple(types.items()),
    )
    name = types.get("") or "exported program"
    return Explanation(name, notes["policy"], low, device, False, (record,))


def _name_weights(gm: fx.GraphModule, program: ExportedProgram) -> None:
    """Gives the placeholders of weights the names that the model has for them."""
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in WEIGHTS
    }
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in targets:
            node.target = targets[node.name]
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def _casts(gm: fx.GraphModule, reader: GraphReader) -> list[CastRecord]:
    return [
        cast_record(node, node.all_input_nodes[0], reader, clean_reason(CAST.of(node).reason))
        for node in gm.graph.nodes
        if CAST.is_on(node)
    ]


def _stored(gm: fx.GraphModule, reader: GraphReader, stored: dict[str, Any]) -> list[CastRecord]:
    """The casts of weights that are stored low: done once and for all."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        _stored_cast(node, reader, index)
        for node in placeholders
        for index in range(stored.get(node.name, 0))
    ]


def _stored_cast(node: fx.Node, reader: GraphReader, index: int) -> CastRecord:
    value = recorded_value(node)
    dtype = dtype_name(value.dtype)
    return CastRecord(
        name=f"{node.name}_{dtype}_{index}" if index else f"{node.name}_{dtype}",
        source=node.name,
        from_dtype="float32",
        to_dtype=dtype,
        wanted_by="",
        state="removed",
        removed_by=f"the weight is stored in {dtype}",
        weight=str(node.target),
        consumers=reader.names_of(list(node.users)),
        bytes_read=2 * num_bytes(value),
        bytes_written=num_bytes(value),
    )

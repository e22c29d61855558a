"""Notes in an exported program: the reason for each op's dtype, saved with the program.

``torch.export.save`` writes of the metadata of nodes and graphs what it knows, and the key
``custom``, as JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from amp_fx.dtypes import as_dtype, dtype_name
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
from amp_fx.regions.state import AutocastState
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from amp_fx.policies.policy import Policy

CUSTOM = "custom"
KEY = "amp_fx"

_OURS = (
    *(CAPTURED, CAST, DECISIONS, EXAMPLE_VALUE, HAS_REWRITTEN_BODIES, ISLAND, RANGE_NOTE),
    *(SITE, STORED_LOW, VERSION),
)
_STALE = ("tensor_meta",)
"""Torch's own keys that say what a node produced before."""


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
        for key in [*(key.name for key in _OURS), *_STALE]:
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
            CAST.put(node, Cast(_dtype(old), _dtype(new), None, reason))
        if "decisions" in found:
            decisions = (OpDecision(o, d, CastPolicy(p), w) for o, d, p, w in found["decisions"])
            DECISIONS.put(node, tuple(decisions))
        if "range_guard" in found:
            RANGE_NOTE.put(node, found["range_guard"])
    return _state(about["region"])


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes]


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
        state = state.turned(device, enabled=True, dtype=_dtype(name))
    return state


def _dtype(name: str) -> Any:
    return as_dtype(name)

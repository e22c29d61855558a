"""Explains in words why a node of a rewritten graph has its dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.metadata import CAST, DECISIONS, FLOAT8_NOTE, OPAQUE, SITE
from amp_fx.graphs.opaque import is_bare_function
from amp_fx.tables.reasons import family_of

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.records import OpDecision
    from amp_fx.regions.state import AutocastState

_KINDS = {
    "input": "an argument of the graph",
    "weight": "a parameter or buffer",
    "output": "what the graph returns",
    "cached_cast": "a cast that is computed once per write to the weight",
}


def origin_and_reason(
    node: fx.Node, kind: str, start: AutocastState, fallback: str
) -> tuple[str, str]:
    """Returns the origin of a node's treatment (``NodeRecord.origin``), and a sentence on it."""
    if kind in _KINDS:
        return "", _KINDS[kind]
    if kind == "cast":
        return "", f"inserted for {clean_reason(CAST.of(node).reason)}"
    if fallback:
        return "fallback", f"runs under native autocast: {fallback}"
    if kind == "opaque" and SITE.is_on(node) and is_bare_function(node):
        return "opaque", f"not rewritten, runs in the dtypes of the program: {OPAQUE.of(node)}"
    if kind == "opaque":
        return "opaque", f"not rewritten, runs under native autocast: {OPAQUE.of(node)}"
    site = SITE.get(node)
    if site is None:
        return "", "derived from the forward"
    state: AutocastState = site.state
    if not state.enabled:
        if start.enabled:
            return "region", "autocast is off in the region around it"
        return "off", "autocast is off"
    region = "" if state == start else f", in an inner region ({describe(state)})"
    decisions = decisions_on(node)
    if not decisions:
        return "unlisted", f"no policy: runs in the dtypes of its inputs{region}"
    if FLOAT8_NOTE.is_on(node):
        region = f"; {FLOAT8_NOTE.of(node)}{region}"
    origin = decisions[0].origin
    if origin == "table" and state.policy is not start.policy:
        origin = "region"
    sentences = dict.fromkeys(
        f"{d.op.removeprefix('aten::')}: {d.policy.value} ({d.device_type} {d.origin}), "
        + effect_of(d, state)
        for d in decisions
    )
    return origin, "; ".join(sentences) + region


def decisions_on(node: fx.Node) -> tuple[OpDecision, ...]:
    """Returns the decisions on a node of a decomposition; the last node has the remaining ones."""
    return DECISIONS.get(node) or ()


def effect_of(decision: OpDecision, state: AutocastState) -> str:
    """Returns the effect of a policy, and the reason if the policy is from a table."""
    low = dtype_name(state.low_dtype(decision.device_type))
    family = family_of(decision.op, decision.policy) if decision.origin == "table" else None
    why = f". {family.reason}" if family is not None else ""
    return decision.policy.effect(low) + why


def describe(state: AutocastState) -> str:
    """Returns text such as ``"cpu bfloat16"``; ``"off"`` if autocast is disabled."""
    return ", ".join(region_names(state)) or "off"


def region_names(state: AutocastState) -> tuple[str, ...]:
    """Returns the device types with autocast enabled, with their dtypes."""
    return tuple(f"{device} {dtype_name(state.low_dtype(device))}" for device in state.enabled)


def clean_reason(reason: str) -> str:
    """Returns the op in ``Cast.reason``, without the address of a function."""
    words = reason.strip("<>").split()
    if words[:2] in (["built-in", "function"], ["built-in", "method"]):
        return words[2]
    if words[:1] in (["function"], ["OpOverload(op="]) and len(words) > 1:
        return words[1]
    return reason.removeprefix("aten.")

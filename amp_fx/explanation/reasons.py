"""Why a node is treated as it is: where that comes from, and as a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.islands import is_bare_function
from amp_fx.graphs.metadata import CAST, DECISIONS, FLOAT8_NOTE, ISLAND, SITE

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.decompose import OpDecision
    from amp_fx.regions.state import AutocastState

_KINDS = {
    "input": "an argument of the graph",
    "weight": "a parameter or buffer",
    "copy": "a copy of a weight in a low dtype, kept across calls",
    "output": "what the graph returns",
    "kept_cast": "stands for a cast that is made once per update of the weight",
}


def origin_and_reason(
    node: fx.Node, kind: str, start: AutocastState, fallback: str
) -> tuple[str, str]:
    """Where a node's treatment comes from (``NodeRecord.origin``), and a sentence on it."""
    if kind in _KINDS:
        return "", _KINDS[kind]
    if kind == "cast":
        return "", f"put in for {clean_reason(CAST.of(node).reason)}"
    if fallback:
        return "fallback", f"runs under native autocast: {fallback}"
    if kind == "island" and SITE.is_on(node) and is_bare_function(node):
        return "island", f"left as it is, in the dtypes of the program: {ISLAND.of(node)}"
    if kind == "island":
        return "island", f"left as it is, under native autocast: {ISLAND.of(node)}"
    site = SITE.get(node)
    if site is None:
        return "", "derived from the forward"
    state: AutocastState = site.state
    if not state.enabled:
        if start.enabled:
            return "region", "autocast is off in the region around it"
        return "off", "autocast is off"
    region = "" if state == start else f", in a region of its own ({describe(state)})"
    decisions = decisions_on(node)
    if not decisions:
        return "unlisted", f"no policy: runs in the dtypes of its inputs{region}"
    if FLOAT8_NOTE.is_on(node):
        region = f"; {FLOAT8_NOTE.of(node)}{region}"
    origin = decisions[0].origin
    if origin == "table" and state.policy is not start.policy:
        origin = "region"
    return origin, "; ".join(dict.fromkeys(_sentence(d, state) for d in decisions)) + region


def decisions_on(node: fx.Node) -> tuple[OpDecision, ...]:
    """The decisions on a node; the last of the ops that it was decomposed into has the rest."""
    return DECISIONS.get(node) or ()


def _sentence(decision: OpDecision, state: AutocastState) -> str:
    low = dtype_name(state.low_dtype(decision.device_type))
    op = decision.op.removeprefix("aten::")
    where = f"{decision.device_type} {decision.origin}"
    return f"{op}: {decision.policy.value} ({where}), {decision.policy.effect(low)}"


def describe(state: AutocastState) -> str:
    """``"cpu bfloat16"``; ``"off"`` where no device autocasts."""
    return ", ".join(region_names(state)) or "off"


def region_names(state: AutocastState) -> tuple[str, ...]:
    """Device types that autocast, with their dtypes."""
    return tuple(f"{device} {dtype_name(state.low_dtype(device))}" for device in state.enabled)


def clean_reason(reason: str) -> str:
    """The op in ``Cast.reason``, without the addresses that Python prints."""
    words = reason.strip("<>").split()
    if words[:2] in (["built-in", "function"], ["built-in", "method"]):
        return words[2]
    if words[:1] in (["function"], ["OpOverload(op="]) and len(words) > 1:
        return words[1]
    return reason.removeprefix("aten.")

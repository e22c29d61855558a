"""What an exported program says about itself: why an op runs as it does, kept when it is saved.

``torch.export.save`` writes of a node's metadata what it knows, and the key ``custom``, as JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.casts import inserted_cast
from amp_fx.graphs.metadata import (
    CAPTURED,
    CAST,
    DECISIONS,
    EXAMPLE_VALUE,
    HAS_REWRITTEN_BODIES,
    ISLAND,
    RANGE_NOTE,
    SITE,
    VERSION,
)

if TYPE_CHECKING:
    from amp_fx.policies.policy import Policy

CUSTOM = "custom"
KEY = "amp_fx"

_OURS = (
    *(CAPTURED, CAST, DECISIONS, EXAMPLE_VALUE, HAS_REWRITTEN_BODIES, ISLAND, RANGE_NOTE),
    *(SITE, VERSION),
)
_STALE = ("tensor_meta",)
"""Torch's own keys that say what a node produced before."""


def note_and_clean(gm: fx.GraphModule, policy: Policy | None = None) -> None:
    """Replaces what passes wrote onto the nodes of a graph by what may be saved with it.

    Args:
        gm: The graph.
        policy: What is noted of it as a whole; None leaves what is noted there.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _note(node)
                for key in [*(key.name for key in _OURS), *_STALE]:
                    node.meta.pop(key, None)
    if policy is not None:
        gm.meta[CUSTOM] = {**(gm.meta.get(CUSTOM) or {}), KEY: {"policy": policy.name}}


def _note(node: fx.Node) -> None:
    found: dict[str, Any] = {}
    cast = inserted_cast(node)
    if cast is not None:
        found["cast"] = [dtype_name(cast.source_dtype), dtype_name(cast.dtype), cast.reason]
    decisions = DECISIONS.get(node) or ()
    if decisions:
        found["decisions"] = [[d.op, d.device_type, d.policy.value, d.origin] for d in decisions]
    if RANGE_NOTE.is_on(node):
        found["range_guard"] = RANGE_NOTE.of(node)
    if found:
        node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), KEY: found}

"""Accessors for the keys that we write into ``node.meta``, one for each key."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import fx

    from amp_fx.graphs.casts import Cast
    from amp_fx.graphs.decompose import OpDecision, Site

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Key(Generic[T]):
    """One key of ``node.meta``."""

    name: str

    def of(self, node: fx.Node) -> T:
        """Returns the node's value, which must exist."""
        found: T = node.meta[self.name]
        return found

    def get(self, node: fx.Node) -> T | None:
        """Returns what a node has; None if it has nothing."""
        return node.meta.get(self.name)

    def is_on(self, node: fx.Node) -> bool:
        """Returns True if a node has something, which may be None."""
        return self.name in node.meta

    def put(self, node: fx.Node, value: T) -> None:
        """Records what a node has."""
        node.meta[self.name] = value

    def drop(self, node: fx.Node) -> None:
        """Takes it off."""
        del node.meta[self.name]


SITE: Key[Site] = Key("site")
"""The region and grad mode that a node stands in (``mark_regions``)."""
ISLAND: Key[str] = Key("island")
"""Why a node stays as it is, under native autocast: it is opaque to the passes."""
IS_WRAPPED: Key[bool] = Key("is_wrapped_island")
"""Markers stand around an island (``wrap_islands``)."""
CAPTURED: Key[Any] = Key("captured")
"""The value that capture recorded."""
VALUE: Key[Any] = Key("val")
"""The value after rewriting, torch's own key (``values.set_value``)."""
EXAMPLE_VALUE: Key[Any] = Key("example_value")
"""The same under Dynamo's key."""
VERSION: Key[tuple[int, int] | None] = Key("version")
"""The version that the value has where the node stands (``values.version_of``)."""
DECISIONS: Key[tuple[OpDecision, ...]] = Key("decisions")
"""The ops with a policy that were met when the node was decomposed."""
CAST: Key[Cast] = Key("cast")
"""The record of a cast that a pass put in (``casts``)."""
RANGE_NOTE: Key[str] = Key("range_guard")
"""Which number the low dtype could not hold, and what was done about it."""
FLOAT8_NOTE: Key[str] = Key("float8")
"""How a product runs in float8, or why it does not (``quantize_products``)."""
HAS_REWRITTEN_BODIES: Key[bool] = Key("has_rewritten_bodies")
"""The graphs of a higher-order op hold casts of their own (``bodies``)."""
CONSTANT: Key[torch.Tensor] = Key("amp_fx_constant")
"""The tensor of a ``get_attr`` node of what is computed from weights (``weights.split``)."""
IS_CACHED: Key[bool] = Key("is_cached")
"""The result of a cast is cached across calls (``explanation.recorder``)."""
STORED_LOW: Key[int] = Key("stored_low")
"""How many casts of a weight went when it came to be stored low (``store_weights_low``)."""

_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", SITE.name)


def provenance(node: fx.Node) -> dict[str, Any]:
    """Returns the metadata of a node that nodes made from it keep."""
    return {key: node.meta[key] for key in _PROVENANCE if key in node.meta}

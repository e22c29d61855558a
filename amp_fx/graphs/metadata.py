"""Accessors for the keys of ``node.meta`` that amp_fx uses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import fx

    from amp_fx.graphs.records import AutocastSite, Cast, OpDecision, RemovedCast

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Key(Generic[T]):
    """One key of ``node.meta``."""

    name: str

    def of(self, node: fx.Node) -> T:
        """Returns a node's value, which must exist."""
        value: T = node.meta[self.name]
        return value

    def get(self, node: fx.Node) -> T | None:
        """Returns a node's value; None if it has none."""
        return node.meta.get(self.name)

    def is_on(self, node: fx.Node) -> bool:
        """Returns True if a node has a value, which may be None."""
        return self.name in node.meta

    def put(self, node: fx.Node, value: T) -> None:
        """Sets a node's value."""
        node.meta[self.name] = value

    def drop(self, node: fx.Node) -> None:
        """Deletes a node's value."""
        del node.meta[self.name]


SITE: Key[AutocastSite] = Key("site")
"""The region and grad mode of a node (``mark_regions``)."""
OPAQUE: Key[str] = Key("opaque")
"""The reason why a node is opaque to the passes and runs under native autocast."""
IS_WRAPPED: Key[bool] = Key("is_wrapped_opaque")
"""An opaque node is surrounded by markers (``wrap_opaque_nodes``).

The key ``is_wrapped`` is torch's: code generation calls ``torch.fx.wrap`` for such nodes.
"""
CAPTURED: Key[Any] = Key("captured")
"""The value that Dynamo or ``torch.export`` recorded."""
VALUE: Key[Any] = Key("val")
"""The value after rewriting, under torch's key (``values.set_value``)."""
EXAMPLE_VALUE: Key[Any] = Key("example_value")
"""The same value under Dynamo's key."""
CUSTOM: Key[dict[str, Any]] = Key("custom")
"""Dynamo's annotations of a node (``policy_mode``)."""
MODULE_STACK: Key[dict[str, tuple[str, Any]]] = Key("nn_module_stack")
"""The names and classes of the modules around a node, outermost first."""
VERSION: Key[tuple[int, int] | None] = Key("version")
"""The version of the value when the node was evaluated (``values.version_of``)."""
DECISIONS: Key[tuple[OpDecision, ...]] = Key("decisions")
"""The ops with a policy in the decomposition of a node."""
CAST: Key[Cast] = Key("cast")
"""The description of an inserted cast (``casts``)."""
RANGE_NOTE: Key[str] = Key("range_guard")
"""A number that the low dtype cannot represent, and its treatment (``range_guard``)."""
FLOAT8_NOTE: Key[str] = Key("float8")
"""How a product runs in float8, or the reason why it does not (``quantize_products``)."""
HAS_REWRITTEN_BODIES: Key[bool] = Key("has_rewritten_bodies")
"""The bodies of a higher-order op contain inserted casts (``bodies``)."""
CONSTANT: Key[torch.Tensor] = Key("amp_fx_constant")
"""The tensor of a ``get_attr`` node in ``prepare`` (``weights.prepare``)."""
REMOVED_CASTS: Key[tuple[RemovedCast, ...]] = Key("removed_casts")
"""The casts that a node replaced (``casts.replace_cast``)."""

# No values and no decisions: those of the new nodes are their own.
_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", SITE.name)


def provenance(node: fx.Node) -> dict[str, Any]:
    """Returns the metadata that a node passes on to the nodes that replace it."""
    return {key: node.meta[key] for key in _PROVENANCE if key in node.meta}

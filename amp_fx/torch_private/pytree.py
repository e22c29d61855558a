"""Functions on nested containers. torch 2.13 to 2.15 have no public equivalent."""

from __future__ import annotations

from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = (
    "GetAttrKey",
    "MappingKey",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
)

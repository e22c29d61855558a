"""Shares equal casts, and removes casts that undo each other, without changing any bits.

Before:
    %w_bfloat16   = aten._to_copy(%w, dtype=torch.bfloat16)
    %y            = aten.linear(%x, %w_bfloat16)
    %w_bfloat16_1 = aten._to_copy(%w, dtype=torch.bfloat16)
    %z            = aten.linear(%y, %w_bfloat16_1)
After:
    %w_bfloat16   = aten._to_copy(%w, dtype=torch.bfloat16)
    %y            = aten.linear(%x, %w_bfloat16)
    %z            = aten.linear(%y, %w_bfloat16)

Left unchanged: casts in the user's code, and duplicates that eager autocast does not share and
that autograd records. AOTAutograd merges the latter after differentiation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.bodies import rewritten_bodies
from amp_fx.graphs.casts import (
    KERNEL_RESULT,
    inserted_cast,
    is_cacheable,
    is_widening,
    replace_cast,
)
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import OPAQUE, SITE, VALUE, VERSION
from amp_fx.graphs.opaque import TRANSFORM
from amp_fx.graphs.values import storage_id, tensors_in, version_of
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.graphs.records import Cast


@dataclasses.dataclass(frozen=True)
class FoldCasts:
    """Shares equal casts and removes lossless round trips.

    Casts that autograd records are shared only if eager autocast caches them. All other casts are
    shared. See Note [Sharing casts] in ``amp_fx/graphs/casts.py``.
    """

    name: ClassVar[str] = "fold_casts"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``casts_shared`` and ``round_trips_removed``, also in higher-order ops."""
        counts: Counter[str] = Counter()
        counts["round_trips_removed"] = _remove_round_trips(gm.graph)
        counts["casts_shared"] = _share_casts(gm.graph)
        for body in rewritten_bodies(gm):
            counts.update(self.call(body).counts)
        return PassResult(counts)


def _share_casts(graph: fx.Graph) -> int:
    first_casts: dict[Any, fx.Node] = {}
    num_shared = 0
    for node in list(graph.nodes):
        cast = inserted_cast(node)
        if cast is None or not _may_share(node, cast):
            continue
        # Compare tensors, not nodes: ``w.float()`` returns ``w`` itself if ``w`` is float32.
        source = id(VALUE.get(node.all_input_nodes[0]))
        key = (source, cast.dtype, cast.source_version, SITE.of(node).is_grad_enabled)
        first = first_casts.setdefault(key, node)
        if first is not node:
            replace_cast(node, first, f"shared with {first.name}")
            num_shared += 1
    return num_shared


def _may_share(node: fx.Node, cast: Cast) -> bool:
    if cast.source_version is None or is_aliased(node):
        return False
    return not has_gradient(node) or is_cached_by_eager(node)


def is_cached_by_eager(node: fx.Node) -> bool:
    """Returns True if eager autocast would cache a cast that autograd records."""
    source: torch.Tensor = VALUE.of(node.all_input_nodes[0])
    if not is_cacheable(source):
        return False
    site, device_type = SITE.of(node), source.device.type
    is_low = dict(site.state.low_dtypes).get(device_type) == VALUE.of(node).dtype
    return is_low and bool(site.state.cache_enabled) and not site.is_branch


def has_gradient(node: fx.Node) -> bool:
    """Returns True if autograd records this cast."""
    value: torch.Tensor = VALUE.of(node)
    return value.requires_grad


def is_aliased(node: fx.Node) -> bool:
    """Returns True if an op returns a view of the cast: a write to the view changes the cast."""
    if any(OPAQUE.get(user) == TRANSFORM for user in node.users):
        return True  # inside, the tensor is wrapped
    storage = storage_id(VALUE.of(node))
    return any(
        storage_id(out) == storage for user in node.users for out in tensors_in(VALUE.get(user))
    )


def _remove_round_trips(graph: fx.Graph) -> int:
    """Removes inserted casts to the dtype that their input was widened from."""
    num_removed = 0
    for node in list(graph.nodes):
        cast = inserted_cast(node)
        if cast is None or not _closes_round_trip(node, cast):
            continue
        widened = node.all_input_nodes[0]
        origin = widened.all_input_nodes[0]
        replace_cast(node, origin, f"round trip: the value was {dtype_name(cast.dtype)} before")
        if not widened.users:
            replace_cast(widened, origin, "only a cast back read it")
        num_removed += 1
    return num_removed


_CAST_METHODS = ("to", "float", "double")


def _closes_round_trip(node: fx.Node, cast: Cast) -> bool:
    widened = node.all_input_nodes[0]
    first = inserted_cast(widened)
    if first is None and widened.target not in _CAST_METHODS:
        return False
    if first is not None and first.reason == KERNEL_RESULT:
        return False  # the real kernel returns a wide tensor, unlike its fake kernel
    origin = widened.all_input_nodes[0]
    value = VALUE.get(origin)
    if len(widened.all_input_nodes) != 1 or not isinstance(value, torch.Tensor):
        return False
    is_lossless = value.dtype == cast.dtype and is_widening(value.dtype, cast.source_dtype)
    same_device = value.device == VALUE.of(node).device
    is_fresh = cast.source_version is not None and cast.source_version == VERSION.of(widened)
    if not (is_lossless and same_device and is_fresh) or is_aliased(node):
        return False
    # With other users, gradients would be added in another dtype.
    is_only_path = len(origin.users) == 1 and len(widened.users) == 1
    return is_only_path if has_gradient(node) else _is_unwritten(widened, origin)


def _is_unwritten(widened: fx.Node, origin: fx.Node) -> bool:
    """Returns True if the graph does not write to the origin after it was widened."""
    cast = inserted_cast(widened)
    version = cast.source_version if cast is not None else VERSION.of(origin)
    return version is not None and version == version_of(VALUE.of(origin))

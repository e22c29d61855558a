"""Reads weights whose casts are kept through storages of their own.

Before:
    %weight          = placeholder[weight]
    %weight_kept     = placeholder[weight_kept]
    %weight_bfloat16 = amp_fx.kept_cast(%weight, %weight_kept)
    %rows            = aten.embedding(%weight, %tokens)
After (where autograd records the read; elsewhere the alias is used as it is):
    %weight          = placeholder[weight]
    %weight_kept     = placeholder[weight_kept]
    %weight_alias    = placeholder[weight_alias]
    %weight_bfloat16 = amp_fx.kept_cast(%weight, %weight_kept)
    %weight_read     = amp_fx.kept_cast(%weight, %weight_alias)
    %rows            = aten.embedding(%weight_read, %tokens)

Compiled kernels ask what they read for a pointer to write through, which for a weight tells of
a write. The alias has the same bytes, and nobody watches its storage. Every use has a
``kept_cast`` of its own, so that gradients add up as they would. Left alone on purpose: weights
that an output may alias, and reads by opaque regions, which run eagerly.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.dtypes import is_spread
from amp_fx.graphs.metadata import ISLAND, KEPT_INPUT, SITE
from amp_fx.graphs.values import analysis, detect_fake_mode, set_value, storage_id, value_of
from amp_fx.passes.base import PassResult
from amp_fx.passes.keep_weight_casts import add_kept_input, kept_casts
from amp_fx.policies.float8 import float8_product
from amp_fx.weights.kept_cast import kept_cast

if TYPE_CHECKING:
    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode


@dataclasses.dataclass(frozen=True)
class AliasWeightReads:
    """Replaces reads of weights whose casts are, or could be, kept.

    Attributes:
        weights: As for ``KeepWeightCasts``.
    """

    name: ClassVar[str] = "alias_weight_reads"
    weights: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weight_reads_aliased``."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        slots = [KEPT_INPUT.of(n) for n in placeholders if KEPT_INPUT.is_on(n)]
        aliased = {slot.source_index for slot in slots if slot.is_alias}
        cast = {source for _, source in kept_casts(gm, [name for name, _ in self.weights])}
        found = {slot.source_index for slot in slots} | {placeholders.index(w) for w in cast}
        handed_out = {storage_id(value_of(n)) for n in _tensor_outputs(gm.graph)}
        counts: Counter[str] = Counter()
        for index in sorted(found - aliased):
            weight = placeholders[index]
            if is_spread(value_of(weight)):
                continue
            reads = [user for user in weight.users if _is_replaceable(user)]
            if reads and storage_id(value_of(weight)) not in handed_out:
                _alias(gm.graph, weight, index, reads)
                counts["weight_reads_aliased"] += len(reads)
        return PassResult(counts)


def _tensor_outputs(graph: fx.Graph) -> list[fx.Node]:
    nodes = graph.output_node().all_input_nodes
    return [node for node in nodes if isinstance(value_of(node), torch.Tensor)]


def _is_replaceable(user: fx.Node) -> bool:
    return (
        user.target not in (kept_cast, float8_product)
        and user.op != "output"
        and not ISLAND.is_on(user)
    )


def _alias(graph: fx.Graph, weight: fx.Node, index: int, reads: list[fx.Node]) -> None:
    alias = add_kept_input(graph, weight, index, value_of(weight).dtype, is_alias=True)
    fake_mode = detect_fake_mode(graph)
    for user in reads:
        user.replace_input_with(weight, _read(graph, weight, alias, user, fake_mode))


def _read(
    graph: fx.Graph,
    weight: fx.Node,
    alias: fx.Node,
    user: fx.Node,
    fake_mode: FakeTensorMode | None,
) -> fx.Node:
    is_grad_enabled = SITE.of(user).is_grad_enabled
    if not (is_grad_enabled and value_of(weight).requires_grad):
        return alias
    with graph.inserting_before(user):
        read = graph.call_function(kept_cast, (weight, alias))
    SITE.put(read, SITE.of(user))
    with analysis(fake_mode, is_grad_enabled=True):
        set_value(read, kept_cast(value_of(weight), value_of(alias)))
    return read

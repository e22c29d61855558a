"""Packs constants for the kernels that read them, by inductor's freezing passes.

Before:
    %y = aten.addmm(%bias, %x, %frozen)
After:
    %packed = mkldnn._reorder_linear_weight(%frozen, 4)
    %y      = mkldnn._linear_pointwise(%x, %packed, %bias, "none", [], "")

Inductor's passes also join products of one input, and remove copies. Copies that the caller relies
on are added again: outputs never share memory that they did not share before.

Left unchanged: what inductor does not pack, such as products on accelerators.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.patches import (
    batch_norm_folding,
    folding_constants_by,
    packing_for_onednn,
    packing_low_products,
    packing_products_of_vectors,
)
from amp_fx.weights.aliases import escaping, viewed_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.weights.pack import Constants


@dataclasses.dataclass(frozen=True)
class PackForKernels:
    """Runs the freezing passes as ``fw_compiler_freezing`` does, with own constant folding.

    Relies on ``cpp.enable_concat_linear``, which turns on a pattern that joins products.

    Attributes:
        constants: The constants of the graph.
        folds_batch_norm: Whether inductor folds batch norms into convolutions.
        chooses_kernels: Whether products may add up in another order than each of them does in
            oneDNN: products of one input as one product, and float32 products in oneDNN.
    """

    name: ClassVar[str] = "pack_for_kernels"
    is_needed: ClassVar[bool] = True
    constants: Constants = dataclasses.field(repr=False)
    folds_batch_norm: bool
    chooses_kernels: bool

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``packed_nodes``, the nodes that inductor's passes added."""
        from amp_fx.torch_private.inductor import freezing_passes, record_has_frozen_params
        from amp_fx.torch_private.inductor_config import config

        before = set(gm.graph.nodes)
        joins = {"cpp.enable_concat_linear": True} if self.chooses_kernels else {}
        with (
            folding_constants_by(self.constants.fold),
            batch_norm_folding(self.folds_batch_norm),
            config.patch(joins),
            packing_for_onednn() if self.chooses_kernels else packing_low_products(),
            packing_products_of_vectors(),
        ):
            splits, sharing = set(_splits(gm.graph)), _outputs_sharing(gm)
            freezing_passes(gm, list(map(VALUE.of, gm.graph.find_nodes(op="placeholder"))))
            if added := [split for split in _splits(gm.graph) if split not in splits]:
                _copy_returned_parts(gm, added)
            _separate_outputs(gm, sharing)
        record_has_frozen_params(gm)
        return PassResult(Counter(packed_nodes=len(before.symmetric_difference(gm.graph.nodes))))


def _splits(graph: fx.Graph) -> Sequence[fx.Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.aten.split_with_sizes.default)


def _copy_returned_parts(gm: fx.GraphModule, splits: Sequence[fx.Node]) -> None:
    """Copies results of joined products that a graph returns.

    Products that are not joined are contiguous, and each has a separate storage.

    Args:
        gm: The graph.
        splits: The nodes that split joined products.
    """
    output = gm.graph.output_node()
    returned = {output, *escaping(gm, len(output.args[0]))}  # type: ignore[arg-type]
    for part in [part for split in splits for part in split.users if part in returned]:
        with gm.graph.inserting_after(part):
            copy = gm.graph.call_function(
                torch.ops.aten.clone.default, (part,), {"memory_format": torch.contiguous_format}
            )
        VALUE.put(copy, VALUE.of(part).contiguous())
        part.replace_all_uses_with(copy, returned.__contains__)


def _outputs_sharing(gm: fx.GraphModule) -> list[fx.Node | int | None]:
    """Returns what each output of a graph shares memory with.

    That is an input or a constant of the graph, or the position of an earlier output. It is the
    position of the output itself if the output shares its memory with none of these.
    """
    sharing: list[fx.Node | int | None] = []
    first: dict[fx.Node, int] = {}
    for i, output in enumerate(gm.graph.output_node().args[0]):  # type: ignore[arg-type]
        base = viewed_by(output) if isinstance(output, fx.Node) else None
        is_given = base is not None and base.op in ("placeholder", "get_attr")
        sharing.append(base if is_given or base is None else first.setdefault(base, i))
    return sharing


def _separate_outputs(gm: fx.GraphModule, sharing: Sequence[fx.Node | int | None]) -> None:
    """Copies outputs that share memory because passes removed a copy.

    Inductor's freezing removes casts to the dtype that a value has, which are copies.

    Args:
        gm: The graph.
        sharing: ``_outputs_sharing`` before the passes.
    """
    output = gm.graph.output_node()
    returned: list[Any] = [*output.args[0]]  # type: ignore[misc]
    pairs = zip(sharing, _outputs_sharing(gm), strict=True)
    for i in [
        i for i, (before, after) in enumerate(pairs) if isinstance(before, int) and before != after
    ]:
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (returned[i],))
        VALUE.put(copy, VALUE.of(returned[i]).clone())
        returned[i] = copy
    output.args = (tuple(returned),)

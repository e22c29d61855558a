"""Takes casts of weights out of the graph: a kept copy becomes an input.

Before:
    %weight          = placeholder[weight]
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After (where autograd records the cast; elsewhere the copy is used as it is):
    %weight          = placeholder[weight]
    %weight_kept     = placeholder[weight_kept]
    %weight_bfloat16 = amp_fx.kept_cast(%weight, %weight_kept)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)

Every cast is replaced where it stands, so that what was shared stays shared and no
gradient changes. Left alone on purpose: weights that the graph writes, casts that an
output or a view handed out may alias, weights with symbolic sizes, regions with
``cache_enabled=False``, and what inductor fuses on accelerators, where a refresh would be one more
launch. Those are biases that it adds in a kernel behind the product, and weights in training that
a kernel reads whole in their own dtype: it writes the low copy, too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from amp_fx.dtypes import dtype_name, is_spread
from amp_fx.graphs.casts import inserted_cast
from amp_fx.graphs.metadata import CAPTURED, CAST, ISLAND, KEPT_INPUT, SITE
from amp_fx.graphs.places import input_path
from amp_fx.graphs.values import (
    analysis,
    call_target,
    detect_fake_mode,
    is_written,
    set_value,
    storage_id,
    tensors_in,
    value_of,
)
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_casts import has_gradient, is_aliased
from amp_fx.passes.lay_out_kept_copies import is_convolution
from amp_fx.passes.low_reads import readers
from amp_fx.policies.float8 import float8_product, float8_weight
from amp_fx.weights.kept_cast import Slot, kept_cast
from amp_fx.weights.kept_float8 import Float8Slot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx


@dataclasses.dataclass(frozen=True)
class KeepWeightCasts:
    """Replaces casts of weights by inputs.

    Attributes:
        weights: Names of the placeholders whose casts may be kept, each with the names of
            the inputs that share its storage, itself included.
    """

    name: ClassVar[str] = "keep_weight_casts"
    weights: tuple[tuple[str, tuple[str, ...]], ...]

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``weight_casts_kept``; marks new placeholders with ``kept_input``."""
        counts: Counter[str] = Counter()
        placeholders = gm.graph.find_nodes(op="placeholder")
        written = {node.name for node in placeholders if is_written(node)}
        weights = [name for name, sharing in self.weights if written.isdisjoint(sharing)]
        kept: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        for cast, source in kept_casts(gm, weights):
            if has_gradient(cast) and _is_read_whole(gm, source):
                continue
            dtype = value_of(cast).dtype
            if (source, dtype) not in kept:
                index = placeholders.index(source)
                kept[source, dtype] = add_kept_input(gm.graph, source, index, dtype)
            _replace(gm.graph, cast, source, kept[source, dtype])
            counts["weight_casts_kept"] += 1
        for node in gm.graph.find_nodes(op="call_function", target=float8_weight):
            if _can_keep_quantized(node, weights):
                _keep_quantized(gm.graph, node, placeholders.index(node.args[0]))
                counts["quantized_weights_kept"] += 1
        return PassResult(counts)


def kept_casts(gm: fx.GraphModule, weights: Iterable[str]) -> list[tuple[fx.Node, fx.Node]]:
    """The casts of some weights that can be kept, each with its weight's placeholder."""
    by_name = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    nodes = [by_name[name] for name in weights]
    keepable = {id(value_of(node)): node for node in nodes if not is_written(node)}
    pairs = [(node, _kept_source(node, keepable)) for node in gm.graph.nodes]
    return [(cast, source) for cast, source in pairs if source is not None]


def _kept_source(node: fx.Node, keepable: dict[int, fx.Node]) -> fx.Node | None:
    """The weight of a cast that can be kept; None for any other node."""
    cast = inserted_cast(node)
    if cast is None or not SITE.of(node).state.cache_enabled:
        return None
    source = keepable.get(id(value_of(node.all_input_nodes[0])))
    if source is None or is_aliased(node) or free_symbols(value_of(source)):
        return None
    if all(_adds_behind(user, node) for user in node.users):
        return None
    return source if all(user.op != "output" for user in node.users) else None


def _adds_behind(user: fx.Node, cast: fx.Node) -> bool:
    """Whether a node adds a bias in a kernel that inductor generates, where a cast is free.

    That is so behind products in float8; of convolutions except on the CPU; and of ``linear`` where
    PyTorch makes it ``matmul`` and ``add``, as of an input of three dimensions that is not
    contiguous. Relies on ``torch._inductor.kernel.conv.convolution``.
    """
    if user.target is torch.ops.aten.add.Tensor:
        return getattr(user.args[0], "target", None) is float8_product and user.args[1] is cast
    places = [i for i, argument in enumerate(user.args) if argument is cast]
    if places != [2] and user.kwargs.get("bias") is not cast:
        return False
    if is_convolution(user):
        return bool(value_of(cast).device.type != "cpu")
    if getattr(user.target, "__name__", "") not in ("linear", "linear.default"):
        return False
    reads = _fused_reads(user, cast)
    return reads.num_fused > 0 and reads.num_others == 0


def _is_read_whole(gm: fx.GraphModule, weight: fx.Node) -> bool:
    """Whether one of inductor's kernels on an accelerator reads all of a weight in its own dtype.

    Such a kernel reads 4 bytes of each element in float32 and writes 2 of a low copy, which a
    product reads: 8 in every call. With a kept copy that is 6, and 6 more after an update, so that
    keeping pays from the fourth call between two updates on.
    """
    value = value_of(weight)
    if value.device.type == "cpu" or is_spread(value):  # the CPU has a variant that casts
        return False
    return any(
        _fused_reads(reader, weight).num_fused
        for reader, _ in readers(gm, weight)
        if reader.op.startswith("call") and not ISLAND.is_on(reader) and not inserted_cast(reader)
    )


def _fused_reads(reader: fx.Node, read: fx.Node) -> _Reads:
    """Counts what a node's ops do with all of a tensor."""
    value, reads = value_of(read), _Reads(set())
    with analysis(detect_fake_mode(reader.graph), is_grad_enabled=False):
        # Tensors of its own: those of the graph know how often they were written.
        own = {
            node: tree_map_only(torch.Tensor, torch.empty_like, value_of(node))
            for node in reader.all_input_nodes
        }
        tensors = [n for n in own if isinstance(own[n], torch.Tensor)]
        parts = [own[n] for n in tensors if storage_id(value_of(n)) == storage_id(value)]
        reads.storages.update(storage_id(p) for p in parts if p.numel() == value.numel())
        with reads:
            call_target(reader, *map_arg((reader.args, reader.kwargs), own.__getitem__))
    return reads


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops on some storages: those that inductor generates kernels for, and others."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages, self.num_fused, self.num_others = storages, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_id(tensor) for tensor in tensors_in(args, kwargs)}
        if not self.storages.isdisjoint(given):
            is_fused = bool(_FUSED.intersection(func.tags))
            self.num_fused += is_fused
            self.num_others += not is_fused
        return func(*args, **(kwargs or {}))


_FUSED = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}


def add_kept_input(
    graph: fx.Graph, source: fx.Node, index: int, dtype: torch.dtype, *, is_alias: bool = False
) -> fx.Node:
    """Adds the placeholder of what is kept for a weight, behind all others.

    With ``is_alias`` that is not a copy, but the weight's own bytes.
    """
    kind = "alias" if is_alias else "kept"
    slot = Slot(index, dtype, input_path(source), is_alias)
    node = _add_input(graph, f"{source.name}_{dtype_name(dtype)}_{kind}", slot)
    weight = value_of(source)
    make = _like_exactly if is_alias else torch.empty_like
    with analysis(detect_fake_mode(graph), is_grad_enabled=False):
        set_value(node, make(weight, dtype=dtype, requires_grad=False))
    CAPTURED.put(node, value_of(node))
    SITE.put(node, SITE.of(source))
    return node


def _like_exactly(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """``empty_like`` keeps the strides of dense tensors only."""
    return torch.empty_strided(tensor.size(), tensor.stride(), device=tensor.device, **options)


def _can_keep_quantized(node: fx.Node, weights: Iterable[str]) -> bool:
    source = node.all_input_nodes[0]
    if is_spread(value_of(source)):
        return False  # its factors are of all processes
    is_plain = not free_symbols(value_of(source)) and bool(SITE.of(node).state.cache_enabled)
    return is_plain and source.name in weights and not is_written(source)


def _keep_quantized(graph: fx.Graph, node: fx.Node, index: int) -> None:
    """Replaces the data and the factors of a quantized weight by inputs."""
    source, recipe, has_rows, is_back = node.args
    slot = Float8Slot(index, recipe, has_rows, is_back, input_path(source))  # type: ignore[arg-type]
    side = "back" if is_back else "float8"
    for i, value in enumerate(value_of(node)):
        what = f"{side}_{('data', 'factors')[i]}_{len(graph.find_nodes(op='placeholder'))}"
        new = _add_input(graph, f"{source}_{what}_kept", slot)
        set_value(new, value)
        CAPTURED.put(new, value)
        SITE.put(new, SITE.of(node))
        for user in [user for user in node.users if user.args[1] == i]:
            user.replace_all_uses_with(new)
            graph.erase_node(user)
    graph.erase_node(node)


def _add_input(graph: fx.Graph, name: str, slot: Slot | Float8Slot) -> fx.Node:
    """Adds a placeholder behind all others."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    # What Dynamo tells AOTAutograd of an input: its origin, and that its address is fixed.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = None
    KEPT_INPUT.put(node, slot)
    return node


def _replace(graph: fx.Graph, cast: fx.Node, source: fx.Node, copy: fx.Node) -> None:
    if not has_gradient(cast):
        cast.replace_all_uses_with(copy)
        graph.erase_node(cast)
        return
    cast.target = kept_cast
    cast.args = (source, copy)
    cast.kwargs = {}
    CAST.drop(cast)

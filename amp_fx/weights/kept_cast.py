"""A kept cast: the added input that it becomes, and the op that stands for it.

``amp_fx::kept_cast(weight, low)`` returns ``low``, which the cache keeps equal to
``weight.to(low.dtype)``, and differentiates as that cast does. Its kernel sits on the
Autograd key, so that tracing for AOTAutograd goes through it: the compiled graph holds
neither the op nor, in the forward, the weight.

``region_cast`` takes a leaf's cast from the cache that eager autocast keeps for one region.
Eager autocast casts a leaf once per region, whatever runs in it: graphs, what Dynamo could
not compile, islands. Its uses then add their gradients in the low dtype, which sets bits.
A compiled graph has a cast of its own. With the inner compiler ``"eager"`` and with
``numerics="eager"``, whose bits are eager autocast's, it takes the region's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.graphs.casts import inserted_cast
from amp_fx.graphs.metadata import provenance
from amp_fx.graphs.values import set_value, value_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Hashable, Sequence

    from torch import fx


@dataclasses.dataclass(frozen=True)
class Slot:
    """One kept cast of one graph; the added placeholder has it as its ``KEPT_INPUT``.

    Attributes:
        source_index: Position of the weight among the graph's inputs.
        dtype: Dtype of the copy.
        name: What the user's program calls the weight.
        is_alias: Whether the input is no copy but the weight's own bytes, in a storage that
            may be asked for pointers without anybody taking that for a write.
        memory_format: How the copy is laid out; by default as its weight is.
    """

    source_index: int
    dtype: torch.dtype
    name: str = "a weight"
    is_alias: bool = False
    memory_format: torch.memory_format = torch.preserve_format

    ops: ClassVar[tuple[str, ...]] = ()

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the weight alone."""
        return (self.source_index,)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weight alone."""
        return (self.name,)

    def key(self, weights: tuple[torch.Tensor, ...]) -> Hashable:  # noqa: ARG002
        """Equal for casts that give the same."""
        return self.dtype, self.is_alias, self.memory_format

    def make(self, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Casts the weight."""
        return weights[0].to(self.dtype, copy=True, memory_format=self.memory_format)

    def laid_out(self, weight: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and strides of the copy of a weight."""
        if self.is_alias or (
            self.memory_format is torch.preserve_format and weight.is_contiguous()
        ):
            return self.dtype, weight.stride()
        like = torch.empty_like(
            weight, dtype=self.dtype, device="meta", memory_format=self.memory_format
        )
        return self.dtype, like.stride()


_library = torch.library.Library("amp_fx", "DEF")  # type: ignore[no-untyped-call]
_library.define("kept_cast(Tensor weight, Tensor low) -> Tensor")  # type: ignore[no-untyped-call]


class _KeptCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        ctx.weight_dtype = weight.dtype
        return low.detach()  # no view of ``low``: autograd tells a later write as of any input

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.weight_dtype), None


def _autograd(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _KeptCast.apply(weight, low)  # type: ignore[no-untyped-call]
    return result


def _no_autograd(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return low.view_as(low)


_library.impl("kept_cast", _autograd, "Autograd")  # type: ignore[no-untyped-call]
_library.impl("kept_cast", _no_autograd, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

kept_cast = torch.ops.amp_fx.kept_cast.default

_library.define("laid_out_as_before(Tensor low) -> Tensor")  # type: ignore[no-untyped-call]


def _contiguous(low: torch.Tensor) -> torch.Tensor:
    return low.clone(memory_format=torch.contiguous_format)


_library.impl("laid_out_as_before", _contiguous, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

laid_out_as_before = torch.ops.amp_fx.laid_out_as_before.default
"""A kept copy in the layout that its weight has (``amp_fx.passes.lay_out_kept_copies``)."""


def region_cast(weight: torch.Tensor, low: torch.Tensor | torch.dtype) -> torch.Tensor:
    """The region's cast of a leaf, or ``low`` differentiated as that cast.

    The latter where the region has none to give, or one that is out of date: eager autocast
    does not notice a write to a leaf that it has cast.

    Args:
        weight: The leaf; float32.
        low: Its value in the region's dtype, on the same device; or that dtype, for a value that
            is made if the region's is not new.
    """
    shared, is_new = _cached_cast(weight, low if isinstance(low, torch.dtype) else low.dtype)
    if isinstance(low, torch.dtype) and shared is not None and is_new:
        return shared
    value = weight.detach().to(low) if isinstance(low, torch.dtype) else low
    if shared is None or not torch.equal(shared, value):
        return kept_cast(weight, value)  # type: ignore[no-any-return]
    return shared


def one_region() -> contextlib.AbstractContextManager[Any]:
    """A region for a call that stands in none: what is cast inside is cast once."""
    return torch.autocast("cpu", enabled=False)


def taken_outside(
    gm: fx.GraphModule,
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Makes a graph take its casts of the region as inputs, for a compiler that traces the graph.

    Where a graph reads a leaf in other ways too, the cast stays inside: gradients of all reads
    then add up in the order in which they do in eager code.

    Args:
        gm: The graph, which is changed: inputs are added behind the others.

    Returns:
        Example values of the added inputs, and what makes them from the other inputs of a call.
    """
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    last, examples, found = [*positions][-1:], [], []
    for node in gm.graph.find_nodes(op="call_function", target=region_cast):
        weight, low = node.args
        is_own = inserted_cast(low) is not None and low.args[0] is weight
        is_known = weight in positions and (low in positions or is_own)
        if not is_known or any(user not in (node, low) for user in weight.users):
            node.target = kept_cast
            continue
        with gm.graph.inserting_after(last[0]):
            last = [gm.graph.placeholder(f"{node.name}_of_region")]
        last[0].meta, last[0]._dynamo_source = provenance(node), None
        set_value(last[0], value_of(node))
        node.replace_all_uses_with(last[0])
        gm.graph.erase_node(node)
        examples.append(value_of(node).detach().requires_grad_())
        found.append((positions[weight], positions.get(low), value_of(node).dtype))
        if low not in positions and not low.users:
            gm.graph.erase_node(low)
    gm.recompile()

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [region_cast(inputs[i], dtype if j is None else inputs[j]) for i, j, dtype in found]

    return examples, make


_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {
    3: torch.nn.functional.conv1d,
    4: torch.nn.functional.conv2d,
    5: torch.nn.functional.conv3d,
}


def _cached_cast(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, bool]:
    """Returns autocast's cached cast of a leaf, and whether it was made just now.

    None if the cache cannot be asked for it. The cache has no reader. Relies on an op of the low
    list casting the leaf through it, on autograd saving that very tensor for the backward, on
    such an op taking a first argument of no rows, which makes it cost nothing, and on autograd
    numbering what it records, so that a new cast stands between ``rows`` and the result.
    """
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or not weight.is_leaf:
        return None, False
    if not weight.numel():  # convolutions take none, and nobody can tell such casts apart
        return None, False
    num_dims = weight.dim()
    if num_dims in (1, 2):
        op, sizes, saved = torch.matmul, weight.shape[:1], ("_saved_vec", "_saved_mat2")
        name = saved[num_dims - 1]
    elif num_dims in _CONVOLUTIONS:
        op, sizes, name = _CONVOLUTIONS[num_dims], weight.shape[1:], "_saved_weight"
    else:
        return None, False
    with torch.enable_grad(), torch.autocast(weight.device.type, dtype=dtype):
        rows = weight.new_empty((0, *sizes)).requires_grad_().expand(0, *sizes)
        try:
            result = op(rows, weight)
        except RuntimeError:  # the cache holds the leaf in another dtype, and would give that
            return None, False
    found: torch.Tensor | None = getattr(result.grad_fn, name, None)
    if found is None or found.dtype != dtype:
        return None, False
    before, after = _number(rows), _number(result)
    return found, found.grad_fn is not None and before < _number(found) < after


def _number(result: torch.Tensor) -> int:
    """The number that autograd gave to the op of a result, in order on one thread."""
    node: Any = result.grad_fn
    return int(node._sequence_nr())
